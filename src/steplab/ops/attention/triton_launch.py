"""Launches flash_triton's kernels, for both passes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .triton_repeats import Address, Launch, Launcher, launcher_of, refuse_while_capturing
from .triton_tensors import Columns, Shape, strides_of
from .triton_tuning import Tiles

ROWS_OF_A_CONSUMER = 64
"""Rows of a consumer's tile in a Hopper kernel: ROWS in triton_hopper_tiles.py, which needs Triton."""
SUMS_WIDTH = 32
"""Columns of dQ added to its sums at a time: PART in triton_hopper_gradients.py."""
SUMS_PANEL = 8
"""Contiguous columns of these sums: PANEL in triton_hopper_gradients.py."""
LEAST_SCALE = 1e-30
"""Replaces a scale of zero, because the kernels divide by it; all exponents stay zero."""


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a scale above zero that give the same scores. The kernels take the largest score before they
    scale.
    """
    return (-q, -scale) if scale < 0 else (q, max(scale, LEAST_SCALE))


def base_two(scale: float) -> float:
    """The factor f with exp2(f x) = exp(scale x)."""
    return scale * math.log2(math.e)


def precision(dtype: torch.dtype) -> str:
    """The precision of float32 products, tf32 or ieee, as set in torch.backends.cuda.matmul; ieee for other dtypes."""
    return "tf32" if dtype == torch.float32 and _torch_makes_them_in_tf32() else "ieee"


def _torch_makes_them_in_tf32() -> bool:
    """Reads the older of torch's two settings, which raises if the newer was set; then reads the newer."""
    matmul = torch.backends.cuda.matmul
    try:
        return matmul.allow_tf32
    except RuntimeError:
        return str(matmul.fp32_precision) == "tf32"


class Call(NamedTuple):
    """All that the kernels of a call depend on, besides its tensors' shapes and strides."""

    parts: Columns
    dtype: torch.dtype
    device: torch.device
    products: str
    causal: bool
    scale: float


def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor descriptor without its address."""

    kind: type[Any]
    fields: dict[str, Any]

    def of(self, x: Tensor | Address) -> Any:
        """The descriptor of x, without its constructor's checks, which take longer than some kernels."""
        descriptor = object.__new__(self.kind)
        descriptor.__dict__.update(self.fields, base=x)
        return descriptor


def tile_form(
    tiles: Tiles, dtype: torch.dtype, shape: Shape, strides: Shape, rows: int, columns: int | None = None
) -> Form:
    """The Form of tensors [B, H, S, D] in tiles [1, 1, rows, columns]; `columns` default to the tiles' box."""
    columns = columns or tiles.box
    block = [1, 1, rows, columns]
    if tiles.variant == "portable":
        from triton.tools.tensor_descriptor import TensorDescriptor

        return _form(TensorDescriptor, shape, strides_of(shape, strides), block)
    size = dtype.itemsize
    return _hopper_form(shape, strides_of(shape, strides), block, min(128, columns * size), 8 * size)


def numbers_form(shape: Sequence[int], block: list[int]) -> Form:
    """The Form of contiguous float32 numbers, which the Hopper kernels read, or add to, by blocks."""
    return _hopper_form(shape, list(torch.empty(tuple(shape), device="meta").stride()), block, 0, 32)


def _hopper_form(shape: Sequence[int], strides: list[int], block: list[int], swizzle_bytes: int, bits: int) -> Form:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle_bytes, element_bitwidth=bits, rank=len(block))
    return _form(TensorDescriptor, shape, strides, block, layout=layout)


def _form(kind: type[Any], shape: Sequence[int], strides: list[int], block_shape: list[int], **layout: Any) -> Form:
    fields = {"shape": list(shape), "strides": strides, "block_shape": block_shape, "padding": "zero"}
    return Form(kind, fields | layout)


class Start:
    """A kernel with everything fixed except its tensors: forms of descriptors, numbers, compile-time options.

    To find a compiled kernel, Triton describes each argument in words, which takes longer than a short attention; a
    Start keeps the kernel. Tensors without a form are passed by address, a multiple of 16 bytes.
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
        """Launch on the current device and stream.

        Return the launch, to be repeated, if the raw stream is given and the kernel has run before; else None.
        """
        if self._compiled is None:
            self._compile(tensors)
            return None
        if stream is None or self._launcher is None:
            self._compiled(*self._described(tensors), *self._numbers, *self._constants)
            return None
        addresses = zip(self._forms, (x.data_ptr() for x in tensors), strict=True)
        given = [at if form is None else form.of(Address(at)) for form, at in addresses]
        launch = self._launcher.ready(stream, [*given, *self._numbers, *self._constants])
        launch()
        return launch

    def _compile(self, tensors: Sequence[Tensor]) -> None:
        refuse_while_capturing(tensors[0].device)
        described = self._described(tensors)
        compiled = self._kernel[self._grid](*described, *self._numbers, enable_fp_fusion=True, **self._options)
        if compiled is not None:  # the interpreter compiles nothing
            names = self._kernel.arg_names[len(described) + len(self._numbers) :]
            self._constants = [self._options[name] for name in names]
            self._compiled, self._launcher = compiled[self._grid], launcher_of(compiled, self._grid)

    def _described(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [x if form is None else form.of(x) for form, x in zip(self._forms, tensors, strict=True)]


def hopper_options(tiles: Tiles, parts: Columns, consumers: int = 2) -> dict[str, Any]:
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
    return {
        "M": tiles.queries,
        "N": tiles.keys,
        "D": tiles.box,
        "PRECISION": products,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
