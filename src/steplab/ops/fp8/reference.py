"""The cast to fp8 as its formula reads, by operators of torch.

A format has its largest finite number TOP: 448 of e4m3, 57,344 of e5m2 (Micikevicius et al. 2022, "FP8 Formats for Deep
Learning"). A tensor whose largest magnitude is amax is multiplied by scale = TOP / amax, cut off at TOP and rounded to
the nearest; products are multiplied by the inverse scales. A NaN and an infinity are not hidden: products are NaN.

Shape suffixes: R rows, C columns.
"""

import torch
from torch import Tensor

SMALLEST_AMAX = 2.0**-100
"""Tensors of zeros and of less than this are scaled as if it were theirs, so that the scale is finite."""


def plain_amax(x: Tensor) -> Tensor:
    """The largest magnitude, a float32 scalar on the device of x; NaN if there is one."""
    return x.abs().amax().float()


def plain_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """float32, the product of which with amax is the largest finite number of the format."""
    top = torch.full_like(amax, torch.finfo(dtype).max)  # a Python number is divided as it times the reciprocal
    return top / amax.clamp_min(SMALLEST_AMAX)


def plain_cast(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in fp8, and the inverse scale: a float32 scalar."""
    top, scale = torch.finfo(dtype).max, plain_scale(amax, dtype)
    return (x.float() * scale).clamp(-top, top).to(dtype), scale.reciprocal()


def plain_cast_both(x_RC: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x in fp8 by rows [R, C], by columns [C, R], and the inverse scale; both are contiguous."""
    rows_RC, inverse_scale = plain_cast(x_RC, amax, dtype)
    return rows_RC, rows_RC.t().contiguous(), inverse_scale
