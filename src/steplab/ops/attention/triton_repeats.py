"""Repeats the kernel launches of an earlier call on the same memory.

A layer's tensors get the same addresses each step. A call with the addresses, shapes, strides, type, device, stream and
numbers of an earlier one repeats its launch without further checks.

This file keeps the arguments of Triton's C function, which takes microseconds, and so skips Triton's Python. It records
them as Triton passes them, because versions differ in order and form. If this Triton is unknown, launches are not kept.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from inspect import getclosurevars, isfunction
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from .triton_tensors import Shape

Launch = Callable[[], object]


class Address:
    """Stands in for a tensor in a launch, which reads only its address, without keeping the tensor alive."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class Launcher:
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
        """The launch on a raw stream, with all arguments converted; without Triton's hooks (see `hooked`)."""
        with self._reading:
            self._reader(*self._grid, stream, *self._of_kernel, *arguments)
            return partial(self._in_c, *self._read.pop())


def launcher_of(compiled: Any, grid: Sequence[int]) -> Launcher | None:
    """A Launcher, or None if this Triton's launcher is unlike the expected one."""
    try:
        return Launcher(compiled, grid)
    except (ImportError, AttributeError, KeyError, TypeError):
        return None


def hooked() -> bool:
    """True if a hook must be called at each launch, as for Triton's profiler. Only Triton's own launches call it."""
    runtime = _runtime()
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


@cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


MOST_KEPT = 1024
"""Most calls with kept launches, and most kinds: enough for the layers and micro-steps of a large model."""

Made = tuple[Shape, Shape, torch.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Calls that differ only in the addresses of their tensors."""

    stream: int | None
    """The raw CUDA stream. None if launches are not kept: on a CPU, or a GPU that is not the current one."""
    device: torch.device
    made: tuple[Made, ...]

    def tensors(self) -> list[Tensor]:
        if self.stream is None or _empty is None:
            return [torch.empty_strided(*laid, dtype=dtype, device=self.device) for *laid, dtype in self.made]
        return [_empty(*like) for like in self.made]

    def made_again(self, tensors: Sequence[Tensor]) -> bool:
        """Repeat the launches kept for these tensors; return False if there are none."""
        known = _known.get((self, *map(_address, tensors)))
        if known is None or hooked():
            return False
        for launch in known[0]:
            launch()
        return True

    def keep(self, tensors: Sequence[Tensor], launches: Sequence[Launch | None], needed: object = None) -> None:
        """Keep a call's launches for `made_again`, unless one is missing. `needed` is other memory that they read."""
        ready = [launch for launch in launches if launch is not None]
        if self.stream is None or len(ready) < len(launches) or hooked():
            return
        if len(_known) >= MOST_KEPT:  # addresses that do not come back: start over
            _known.clear()
        _known[self, *map(_address, tensors)] = ready, needed


_known: dict[tuple[Hashable, ...], tuple[Sequence[Launch], object]] = {}
_kinds: dict[Hashable, Kind] = {}


def kind_of(make: Callable[..., tuple[Made, ...]], inputs: tuple[Tensor, ...], *more: Hashable) -> Kind:
    """The Kind of a call with these inputs, which begin with q and k.

    `make` describes the results for the inputs; `more` is all else that the call depends on.
    """
    q, k, *_ = inputs
    device = q.get_device()
    stream = _stream(device) if q.is_cuda and device == torch.cuda.current_device() else None
    seen = (make, stream, device, q.dtype, q.shape, k.shape, *more, *map(Tensor.stride, inputs))
    kind = _kinds.get(seen)
    if kind is None:
        if len(_kinds) >= MOST_KEPT:
            forget()
        kind = _kinds[seen] = Kind(stream, q.device, make(*inputs))
    return kind


def forget() -> None:
    _known.clear()
    _kinds.clear()


def laid_out_as(x: Tensor) -> Made:
    return tuple(x.shape), _strides_like(x.shape, x.stride()), x.dtype


def in_a_row(sizes: Sequence[int], dtype: torch.dtype) -> Made:
    return tuple(sizes), torch.empty(tuple(sizes), device="meta").stride(), dtype


@lru_cache(maxsize=256)
def _strides_like(shape: Shape, strides: Shape) -> Shape:
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def refuse_while_capturing(device: torch.device) -> None:
    """Raise Unsupported while a CUDA graph is recorded: a first call loads kernels and copies tables."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "the first call of 'flash_triton' for a shape while a CUDA graph is recorded",
            "it loads kernels and copies tables, which a graph cannot record",
            "call it once before, forward and backward, with tensors of the same shapes and strides",
        )


_address = Tensor.data_ptr
# Internals of torch's compiled code, if present: a stream without a Python object, and a tensor on the current GPU in
# half the time of `empty_like`, which goes through the dispatcher.
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
