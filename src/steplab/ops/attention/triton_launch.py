"""What both passes of flash_triton have in common when they start a kernel."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .triton_repeats import Address, Launch, Launcher, launcher_of, refuse_while_capturing
from .triton_tensors import Columns, Shape, strides_of
from .triton_tuning import Tiles

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
