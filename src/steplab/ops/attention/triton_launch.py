"""What both passes of flash_triton have in common when they start a kernel."""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from steplab.ops.attention.triton_tensors import Columns, strides_of
from steplab.ops.attention.triton_tuning import Tiles

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
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current device, whatever the tensors' is."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def num_multiprocessors(x: Tensor) -> int:
    """Of the tensor's GPU."""
    return _num_multiprocessors(x.device.index)


@cache
def _num_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def tiles_of_variant(tiles: Tiles, x_BHSD: Tensor, rows: int) -> Any:
    """A descriptor of the tensor in tiles [1, 1, rows, box], as the variant's kernels take it."""
    block = [1, 1, rows, tiles.box]
    if tiles.variant == "portable":
        from triton.tools.tensor_descriptor import TensorDescriptor

        return _described(TensorDescriptor, x_BHSD, list(x_BHSD.shape), strides_of(x_BHSD), block)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _shared_layout(tiles.box, x_BHSD.dtype)
    return _described(TensorDescriptor, x_BHSD, list(x_BHSD.shape), strides_of(x_BHSD), block, layout=layout)


def numbers_of(x: Tensor, rows: int) -> Any:
    """A descriptor of numbers in a row, so many at a time, for the Hopper kernels."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return _described(TensorDescriptor, x, [x.numel()], [1], [rows], layout=_numbers_layout())


def _described(
    kind: type[Any], base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], **layout: Any
) -> Any:
    """A descriptor without the checks of its constructor, which take longer than some kernels; `readable` made them."""
    descriptor = object.__new__(kind)
    fields = {"base": base, "shape": shape, "strides": strides, "block_shape": block_shape, "padding": "zero"}
    descriptor.__dict__.update(fields, **layout)
    return descriptor


@cache
def _shared_layout(box: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    size = dtype.itemsize
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, box * size), element_bitwidth=8 * size, rank=4)


@cache
def _numbers_layout() -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def hopper_options(tiles: Tiles, parts: Columns) -> dict[str, Any]:
    """Keyword arguments that all Hopper kernels take."""
    from steplab.ops.attention.triton_hopper_tiles import CONSUMER_REGISTERS, LOADER_REGISTERS

    return {
        "MAIN": parts.main,
        "REST": parts.rest,
        "BOX": parts.box,
        "NUM_SLOTS": tiles.stages,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "LOADER_REGISTERS": LOADER_REGISTERS,
        "num_warps": 4,
    }


def portable_options(tiles: Tiles, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments that all portable kernels take."""
    return {
        "M": tiles.queries,
        "N": tiles.keys,
        "D": tiles.box,
        "PRECISION": precision(dtype),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
