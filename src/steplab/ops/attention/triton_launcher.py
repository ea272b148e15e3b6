"""Launches of a compiled kernel that can be made again: the one file that knows what Triton's launcher is made of.

Triton makes a launch in two steps. Python puts descriptors of tensors into the form that the driver takes, which
encodes each of them anew; then a function in C reads the arguments and calls the driver. Where a kernel starts again on
the same memory, what the first step gives is what it gave before, and the second takes a few microseconds.

The arguments are those that Triton's own Python gives to that function, so that their order and form, which change
between versions, are nowhere written down here. Where this Triton is built otherwise, there are no such launches.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, partial
from inspect import getclosurevars, isfunction
from threading import Lock
from typing import Any

Launch = Callable[[], object]


class Address:
    """A tensor's place in memory, of which a launch takes nothing else; so that none is kept alive by it."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self._address


class Launcher:
    """Prepares launches of a compiled kernel that has run before."""

    def __init__(self, compiled: Any, grid: Sequence[int]) -> None:
        from triton.backends.nvidia.driver import wrap_handle_tensordesc

        run, metadata = compiled.run, compiled.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise AttributeError("memory is allocated for each launch")
        self._in_c = getclosurevars(run.launch).nonlocals["launcher"] if isfunction(run.launch) else run.launch
        self._read: list[tuple[Any, ...]] = []
        self._reading = Lock()
        descriptors = getattr(metadata, "tensordesc_meta", None)
        self._reader = copy(run)
        self._reader.launch = wrap_handle_tensordesc(self._note, compiled.src.signature, descriptors)
        self._grid, self._of_kernel = grid, (compiled.function, compiled.packed_metadata, None, None, None)

    def _note(self, *given: Any) -> None:
        self._read.append(given)

    def ready(self, stream: int, arguments: Sequence[Any]) -> Launch:
        """The launch on a raw stream, with all arguments read; without Triton's hooks, for which see `hooked`."""
        with self._reading:
            self._reader(*self._grid, stream, *self._of_kernel, *arguments)
            return partial(self._in_c, *self._read.pop())


def launcher_of(compiled: Any, grid: Sequence[int]) -> Launcher | None:
    """None where this Triton's launcher is not as expected here."""
    try:
        return Launcher(compiled, grid)
    except (ImportError, AttributeError, KeyError, TypeError):
        return None


def hooked() -> bool:
    """Whether a hook is to be called at each launch, as Triton's profiler asks: only Triton's own launches call it."""
    runtime = _runtime()
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime
