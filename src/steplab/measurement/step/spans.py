"""Named ranges around parts of a step, for any profiler.

They and their hooks exist only while a profiler runs, so the timed step is unchanged.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from steplab.measurement import compat

_NOTHING = nullcontext()
_NAMES_SHOWN = 3


def activities_on(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


class Spans:
    def __init__(self, *, nvtx: bool) -> None:
        self._nvtx = nvtx
        self._are_on = False
        self._open: list[AbstractContextManager[None]] = []

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return _range(name, self._nvtx) if self._are_on else _NOTHING

    @contextmanager
    def on(self, module: nn.Module | None = None) -> Iterator[tuple[str, ...]]:
        """Each submodule of `module` marks its forward pass by its dotted name. Yields the names of unmarked ones,
        because hooks would change their run.
        """
        modules, left_out = modules_for_hooks(module) if module is not None else ({}, ())
        modules.pop("", None)  # the model as a whole is the forward pass
        with around_calls(modules, self._enter, self._leave):
            self._are_on = True
            try:
                yield left_out
            finally:
                self._are_on = False

    def _enter(self, name: str, *_: object) -> None:
        self._open.append(_range(name, self._nvtx))
        self._open[-1].__enter__()

    def _leave(self, *_: object) -> None:
        self._open.pop().__exit__(None, None, None)


class Place:
    """The module whose forward pass runs, or whose forward pass made an autograd node."""

    def __init__(self) -> None:
        self._open = [""]
        self._boundaries = [(compat.next_sequence_number(), "")]

    def enter(self, module: str, *_: object) -> None:
        self._open.append(module)
        self._boundaries.append((compat.next_sequence_number(), module))

    def leave(self, *_: object) -> None:
        self._open.pop()
        self._boundaries.append((compat.next_sequence_number(), self._open[-1]))

    @property
    def module(self) -> str:
        """Name of the module that runs; '' outside any."""
        return self._open[-1]

    def module_of(self, number: int) -> str:
        """Name of the module that made the node of this sequence number; '' for none."""
        # The last of several boundaries at one number counts: no node was made between them.
        index = bisect_right(self._boundaries, number, key=lambda boundary: boundary[0])
        return self._boundaries[index - 1][1] if index else ""


@contextmanager
def around_calls(
    modules: Mapping[str, nn.Module], enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    """Call `enter` and `leave` around each module's forward pass, with its name ahead of the hooks' arguments."""
    with ExitStack() as hooks:
        for name, module in modules.items():
            # First in and last out: the module's other hooks are part of it. It also ends if the forward pass raises.
            before = module.register_forward_pre_hook(partial(enter, name), prepend=True, with_kwargs=True)
            after = module.register_forward_hook(partial(leave, name), with_kwargs=True, always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield


def modules_for_hooks(model: nn.Module) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Modules that may carry hooks, by dotted name ('' is the model), and names of those left out with all inside."""
    modules: dict[str, nn.Module] = {}
    left_out: list[str] = []
    for name, module in model.named_modules():
        if any(not closed or name.startswith(f"{closed}.") for closed in left_out):
            continue
        if compat.minds_hooks(module):
            left_out.append(name)
        else:
            modules[name] = module
    return modules, tuple(left_out)


def note_on_left_out(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(name or "the model" for name in names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [f"ranges: none inside {shown}{more}, where hooks would change what runs"]


@contextmanager
def _range(name: str, nvtx: bool) -> Iterator[None]:
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
