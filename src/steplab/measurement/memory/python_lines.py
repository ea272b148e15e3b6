"""Finds the Python lines that call torch, for a device whose allocator does not record them.

It is a mode over torch's functions, which unlike one over the dispatcher leaves autograd unchanged. As in a CUDA
history, work of the autograd engine has no line; here neither has the recomputation of a checkpointed forward pass.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode

_DEEPEST = 20
"""The number of frames kept of a stack, innermost first."""

_WITHOUT_LINES = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

Frame = tuple[str, int, str]
"""File, line and function."""


class PythonLines(TorchFunctionMode):
    """A context in which every call of a torch function is a range of the profiler, named by the stack that made it."""

    def __init__(self, prefix: str) -> None:
        """Begin the names of the ranges with `prefix`."""
        super().__init__()
        self._prefix = prefix
        self._numbers: dict[tuple[Frame, ...], int] = {}

    def stack(self, ranges: tuple[str, ...]) -> tuple[Frame, ...]:
        """The stack named by the innermost range that names one; empty if none does."""
        for name in reversed(ranges):
            if name.startswith(self._prefix):
                return list(self._numbers)[int(name.removeprefix(self._prefix))]
        return ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_LINES or func.__name__ == "__get__":  # an attribute allocates nothing
            return func(*args, **kwargs)
        stack = _stack(sys._getframe(1))
        with record_function(f"{self._prefix}{self._numbers.setdefault(stack, len(self._numbers))}"):
            return func(*args, **kwargs)


def _stack(frame: FrameType | None) -> tuple[Frame, ...]:
    """The stack from that frame outwards, without this file."""
    frames: list[Frame] = []
    while frame is not None and len(frames) < _DEEPEST:
        code = frame.f_code
        if code.co_filename != __file__:
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(frames)
