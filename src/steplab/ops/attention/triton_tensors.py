"""Prepares tensors for the kernels: readable by the copy engine (TMA), in tiles with sizes of powers of two.

Shape suffixes: B batch, H heads, S positions, D head dimension.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..triton_places import power_of_two

Shape = tuple[int, ...]
ALIGNMENT = 16
"""Addresses, and all strides except the last, must be multiples of this, in bytes (CUDA driver API,
cuTensorMapEncodeTiled)."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Division of the head dimension for the tensor cores: products are of `main` columns, then of `rest`."""

    main: int
    rest: int
    """0, or a power of two. 80 columns are 64 and 16; padded to 128, products would multiply 48 zeros."""
    box: int
    """Columns of an undivided tile in shared memory: the next power of two, filled up with zeros by the copy engine.

    Tensors that the Hopper kernels load repeatedly come as two tiles instead, of `main` and of `rest`.
    """


@cache
def columns(head_dim: int) -> Columns:
    """The division of `head_dim` columns: in two if three quarters of the next power of two hold them.

    Only from 65 columns on: below, half of that power is narrower than the 128 bytes of shared memory's swizzle.
    """
    box = max(16, power_of_two(head_dim))
    main = box // 2
    rest = max(16, power_of_two(head_dim - main))
    return Columns(box, 0, box) if main < 64 or rest == main else Columns(main, rest, box)


def readable(x_BHSD: Tensor, products: str = "ieee") -> Tensor:
    """The tensor itself if the copy engine (TMA) can read it; else a copy with rows padded with zeros to 16 bytes.

    If `products` is tf32, the result is rounded to TF32.
    """
    if products == "tf32":
        x_BHSD = rounded_to_tf32(x_BHSD)
    if _takes(x_BHSD):
        return x_BHSD
    head_dim = x_BHSD.shape[-1]
    padded = -head_dim % (ALIGNMENT // x_BHSD.element_size())
    if not padded:
        return x_BHSD.clone(memory_format=torch.contiguous_format)
    room = x_BHSD.new_zeros(*x_BHSD.shape[:-1], head_dim + padded)  # torch's own `pad` may keep another order
    room[..., :head_dim] = x_BHSD
    return room


def rounded_to_tf32(x: Tensor) -> Tensor:
    bits = (x.contiguous().view(torch.int32) + 0x1000) & -0x2000
    return torch.where(x.isnan(), x, bits.view(torch.float32))


def writable(x_BHSD: Tensor) -> Tensor:
    """The tensor itself if the copy engine can write it; else memory with padded rows, for `copy_back`."""
    if _takes(x_BHSD):
        return x_BHSD
    padded = -x_BHSD.shape[-1] % (ALIGNMENT // x_BHSD.element_size())
    return x_BHSD.new_empty(*x_BHSD.shape[:-1], x_BHSD.shape[-1] + padded)


def aligned(x: Tensor) -> Tensor:
    return x.contiguous() if x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def _takes(x_BHSD: Tensor) -> bool:
    if x_BHSD.data_ptr() % ALIGNMENT:
        return False
    return _takes_strides(x_BHSD.shape, x_BHSD.stride(), x_BHSD.element_size())


@lru_cache(maxsize=1024)
def _takes_strides(shape: Shape, strides: Shape, element_bytes: int) -> bool:
    numbers = ALIGNMENT // element_bytes
    b, h, s, d = strides_of(shape, strides)
    return d == 1 and min(b, h, s) > 0 and not any(stride % numbers for stride in (shape[-1], b, h, s))


def copy_back(written: Tensor, wanted: Tensor) -> None:
    if written is not wanted:
        wanted.copy_(written[..., : wanted.shape[-1]])


def strides_of(shape: Shape, strides: Shape) -> list[int]:
    """The strides; dimensions of one element, where strides are never used, get a contiguous tensor's."""
    found, expected = list(strides), 1
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            found[dim] = expected
        expected = found[dim] * shape[dim]
    return found
