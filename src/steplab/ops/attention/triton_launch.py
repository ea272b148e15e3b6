"""How both passes of flash_triton start a kernel, and start it again.

In a training step the caching allocator gives the tensors of a layer the addresses that they had in the step before.
What kernels are started with depends on addresses, shapes, strides, type, device, stream and a few numbers, and on
nothing else; so where all of these were seen before, the same launches are made again, and nothing is looked at twice.

Such launches are made by what Triton's launcher is made of, which this file alone knows. Triton makes a launch in two
steps. Python puts descriptors of tensors into the form that the driver takes, which encodes each of them anew; then a
function in C reads the arguments and calls the driver. Where a kernel starts again on the same memory, what the first
step gives is what it gave before, and the second takes a few microseconds.

The arguments are those that Triton's own Python gives to that function, so that their order and form, which change
between versions, are nowhere written down here. Where this Triton is built otherwise, there are no such launches.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from inspect import getclosurevars, isfunction
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import Unsupported
from .triton_tensors import Columns, Shape, strides_of
from .triton_tuning import Tiles

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


MOST_KEPT = 1024
"""Calls, of some kilobytes each: the layers and micro-steps of a large model, forward and backward. And kinds of
these."""

Made = tuple[Shape, Shape, torch.dtype]
"""Sizes, strides and type of a tensor that a call makes."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Calls that differ in the addresses of their tensors alone."""

    stream: int | None
    """The raw stream; None where launches are not kept: on a CPU, or a GPU that is not the current one."""
    device: torch.device
    """That of all tensors."""
    made: tuple[Made, ...]
    """What such a call makes."""

    def tensors(self) -> list[Tensor]:
        """Those that a call makes, without content."""
        if self.stream is None or _empty is None:
            return [torch.empty_strided(*laid, dtype=dtype, device=self.device) for *laid, dtype in self.made]
        return [_empty(*like) for like in self.made]

    def made_again(self, tensors: Sequence[Tensor]) -> bool:
        """Make the launches of the call on these tensors, where they are known."""
        known = _known.get((self, *map(_address, tensors)))
        if known is None or hooked():
            return False
        for launch in known[0]:
            launch()
        return True

    def keep(self, tensors: Sequence[Tensor], launches: Sequence[Launch | None], needed: object = None) -> None:
        """Keep the launches of a call, unless one is not to be had, and what they read besides the call's tensors."""
        ready = [launch for launch in launches if launch is not None]
        if self.stream is None or len(ready) < len(launches) or hooked():
            return
        if len(_known) >= MOST_KEPT:  # addresses that do not come back: begin anew
            _known.clear()
        _known[self, *map(_address, tensors)] = ready, needed


_known: dict[tuple[Hashable, ...], tuple[Sequence[Launch], object]] = {}
_kinds: dict[Hashable, Kind] = {}


def kind_of(make: Callable[..., tuple[Made, ...]], inputs: tuple[Tensor, ...], *more: Hashable) -> Kind:
    """The kind of a call; `make` gives for its inputs what it makes, and `more` is all that is asked for besides.

    inputs begin with q and k, whose shapes and type decide all others'.
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
    """Forget all calls: for who changes by which kernels a call is made."""
    _known.clear()
    _kinds.clear()


def laid_out_as(x: Tensor) -> Made:
    """A tensor of the sizes and type of x, its dimensions in memory in the order of x's: as torch.empty_like has it."""
    return tuple(x.shape), _strides_like(x.shape, x.stride()), x.dtype


def in_a_row(sizes: Sequence[int], dtype: torch.dtype) -> Made:
    """A contiguous tensor."""
    return tuple(sizes), torch.empty(tuple(sizes), device="meta").stride(), dtype


@lru_cache(maxsize=256)
def _strides_like(shape: Shape, strides: Shape) -> Shape:
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def refuse_while_capturing(device: torch.device) -> None:
    """Raise Unsupported where a CUDA graph is recorded: at a first call kernels are loaded and tables copied."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "the first call of 'flash_triton' for a shape while a CUDA graph is recorded",
            "its kernels are loaded and its tables are copied then, which a graph cannot record",
            "call it once before, forward and backward, with tensors of the same shapes and strides",
        )


def _raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


_address = Tensor.data_ptr
# What torch's own compiled code takes, where torch has these: a stream without a Python object around it, and a tensor
# on the current GPU in half the time of `empty_like`, which goes through the dispatcher.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
_empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


Given = TypeVar("Given")
ROWS_OF_A_CONSUMER = 64
"""Rows of a consumer's tile in a Hopper kernel: ROWS in triton_hopper_tiles.py, which needs Triton."""
SUMS_WIDTH = 32
"""Columns of dQ that are added together to its sums: PART in triton_hopper_gradients.py."""
SUMS_PANEL = 8
"""Columns of these that lie together: PANEL there."""
LEAST_SCALE = 1e-30
"""Taken for a scale of zero, by which nothing can be divided: all exponents are zero all the same."""


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a scale above zero with the same scores: the kernels look for the largest score before they scale."""
    return (-q, -scale) if scale < 0 else (q, max(scale, LEAST_SCALE))


def base_two(scale: float) -> float:
    """The factor with which exp2 gives what exp gives with the scale."""
    return scale * math.log2(math.e)


def precision(dtype: torch.dtype) -> str:
    """How products of float32 are made: as torch makes its own (torch.backends.cuda.matmul). Else it has no effect."""
    return "tf32" if dtype == torch.float32 and _torch_makes_them_in_tf32() else "ieee"


def _torch_makes_them_in_tf32() -> bool:
    """By the older of torch's two settings, which raises where the newer was set; then by that."""
    matmul = torch.backends.cuda.matmul
    try:
        return matmul.allow_tf32
    except RuntimeError:
        return str(matmul.fp32_precision) == "tf32"


class Call(NamedTuple):
    """What a call of attention asks of its kernels, besides shapes."""

    parts: Columns
    """The columns of the head dimension, in parts."""
    dtype: torch.dtype
    """Number format of the tensors."""
    device: torch.device
    """Where they are."""
    products: str
    """As `precision` gives it."""
    causal: bool
    """Whether keys after a query's position are hidden."""
    scale: float
    """Scale of the scores, above zero."""


def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class Form:
    """How a kernel takes a tensor that the copy engine reads or writes: what its descriptor holds but the address."""

    kind: type[Any]
    """Triton's or Gluon's TensorDescriptor."""
    fields: dict[str, Any]
    """What is in all descriptors of this form."""

    def of(self, x: Tensor | Address) -> Any:
        """The tensor's descriptor, without the checks of its constructor, which take longer than some kernels."""
        descriptor = object.__new__(self.kind)
        descriptor.__dict__.update(self.fields, base=x)
        return descriptor


def tile_form(
    tiles: Tiles, dtype: torch.dtype, shape: Shape, strides: Shape, rows: int, columns: int | None = None
) -> Form:
    """The form of descriptors of tensors [B, H, S, D] in tiles [1, 1, rows, columns], as the kernels take them; without
    `columns`, of all that a tile holds."""
    columns = columns or tiles.box
    block = [1, 1, rows, columns]
    if tiles.variant == "portable":
        from triton.tools.tensor_descriptor import TensorDescriptor

        return _form(TensorDescriptor, shape, strides_of(shape, strides), block)
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    size = dtype.itemsize
    swizzle = min(128, columns * size)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=4)
    return _form(TensorDescriptor, shape, strides_of(shape, strides), block, layout=layout)


def number_form(count: int, rows: int) -> Form:
    """The form of float32 numbers in a row, read so many at a time by the Hopper kernels."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return _form(TensorDescriptor, [count], [1], [rows], layout=layout)


def sums_form(count: int) -> Form:
    """The form of float32 sums [count, SUMS_WIDTH], to 64 rows of which the backward kernel for Hopper adds at a
    time."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return _form(
        TensorDescriptor, [count, SUMS_WIDTH], [SUMS_WIDTH, 1], [ROWS_OF_A_CONSUMER, SUMS_WIDTH], layout=layout
    )


def _form(kind: type[Any], shape: Sequence[int], strides: list[int], block_shape: list[int], **layout: Any) -> Form:
    fields = {"shape": list(shape), "strides": strides, "block_shape": block_shape, "padding": "zero"}
    return Form(kind, fields | layout)


class Start:
    """A kernel with everything decided but the tensors: their forms, the numbers, and what it is compiled for.

    Triton finds a compiled kernel again by describing each argument in words, which takes longer than a short
    attention. So what calls of equal shapes have in common is kept, the compiled kernel with it. Tensors without a form
    are given by their addresses, which have to be multiples of 16 bytes, for which the kernel is compiled.
    """

    def __init__(
        self, kernel: Any, num_programs: int, forms: Sequence[Form | None], numbers: Sequence[Any], **options: Any
    ) -> None:
        self._kernel, self._grid, self._options = kernel, (num_programs, 1, 1), options
        self._forms, self._numbers = tuple(forms), tuple(numbers)
        self._compiled: Callable[..., None] | None = None
        self._launcher: Launcher | None = None
        self._constants: list[Any] = []

    def __call__(self, *tensors: Tensor, stream: int | None = None) -> Launch | None:
        """Start it on these tensors, on the current device and stream.

        Gives the launch, to be made again with the same tensors, if the raw stream is given and the kernel has run
        before with any.
        """
        if self._compiled is None:
            self._compile(tensors)
            return None
        if stream is None or self._launcher is None:
            described = [x if form is None else form.of(x) for form, x in self._pairs(tensors)]
            self._compiled(*described, *self._numbers, *self._constants)
            return None
        addresses = [x.data_ptr() for x in tensors]
        given = [at if form is None else form.of(Address(at)) for form, at in self._pairs(addresses)]
        launch = self._launcher.ready(stream, [*given, *self._numbers, *self._constants])
        launch()
        return launch

    def _compile(self, tensors: Sequence[Tensor]) -> None:
        refuse_while_capturing(tensors[0].device)
        described = [x if form is None else form.of(x) for form, x in self._pairs(tensors)]
        compiled = self._kernel[self._grid](*described, *self._numbers, enable_fp_fusion=True, **self._options)
        if compiled is not None:  # the interpreter compiles nothing
            names = self._kernel.arg_names[len(described) + len(self._numbers) :]
            self._constants = [self._options[name] for name in names]
            self._compiled, self._launcher = compiled[self._grid], launcher_of(compiled, self._grid)

    def _pairs(self, given: Sequence[Given]) -> Iterator[tuple[Form | None, Given]]:
        return zip(self._forms, given, strict=True)


def hopper_options(tiles: Tiles, parts: Columns, consumers: int = 2) -> dict[str, Any]:
    """Keyword arguments that all Hopper kernels take."""
    from .triton_hopper_tiles import CONSUMER_REGISTERS, LOADER_REGISTERS

    return {
        "MAIN": parts.main,
        "REST": parts.rest,
        "BOX": parts.box,
        "NUM_SLOTS": tiles.stages,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS[consumers],
        "LOADER_REGISTERS": LOADER_REGISTERS,
        "num_warps": 4,
    }


def portable_options(tiles: Tiles, products: str) -> dict[str, Any]:
    """Keyword arguments that all portable kernels take; `products` is what `precision` gave."""
    return {
        "M": tiles.queries,
        "N": tiles.keys,
        "D": tiles.box,
        "PRECISION": products,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
