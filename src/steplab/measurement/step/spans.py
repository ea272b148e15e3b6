"""Named ranges around parts of a step, for any profiler.

They and their hooks exist only while a profiler runs, so the timed step is unchanged.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity
from torch.utils.hooks import RemovableHandle

from steplab.measurement.compat import minds_hooks

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
        hooks, left_out = self._attach(module) if module is not None else ([], ())
        self._are_on = True
        try:
            yield left_out
        finally:
            self._are_on = False
            for hook in hooks:
                hook.remove()

    def _attach(self, module: nn.Module) -> tuple[list[RemovableHandle], tuple[str, ...]]:
        modules, left_out = modules_for_hooks(module)
        # the model as a whole is the forward pass
        return [hook for name, submodule in modules.items() if name for hook in self._mark(name, submodule)], left_out

    def _mark(self, name: str, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        def enter(module: nn.Module, arguments: Any) -> None:
            self._open.append(_range(name, self._nvtx))
            self._open[-1].__enter__()

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            self._open.pop().__exit__(None, None, None)

        # First in and last out: the module's other hooks are part of it. It also ends if the forward pass raises.
        before = module.register_forward_pre_hook(enter, prepend=True)
        return before, module.register_forward_hook(leave, always_call=True)


def modules_for_hooks(model: nn.Module) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Modules that may carry hooks, by dotted name ('' is the model), and names of those left out with all inside."""
    modules: dict[str, nn.Module] = {}
    left_out: list[str] = []
    for name, module in model.named_modules():
        if any(not closed or name.startswith(f"{closed}.") for closed in left_out):
            continue
        if minds_hooks(module):
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
