"""Casts to fp8 with one scale a tensor, as operators of torch: steplab::amax and fp8_cast_both.

Scales stay on the device: Python never waits for one. Kernels run on CUDA, and on a CPU under TRITON_INTERPRET=1;
elsewhere the reference gives the same bits. Tensors must be bf16: for a float32 tensor of one row Triton 3.6 and 3.7.1
misplaced some bytes (seen on an H200).

A tensor is multiplied by scale = TOP / amax, clamped at TOP (448 of e4m3, 57,344 of e5m2; Micikevicius et al. 2022,
"FP8 Formats for Deep Learning") and rounded to nearest; products are multiplied by the inverse scales. A NaN or an
infinity makes products NaN.

Shape suffixes: R rows, C columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Unsupported
from ..torch_library import define
from ..triton_device import on_device_of
from ..triton_places import runs_on

SMALLEST_AMAX = 2.0**-100
"""Lower limit of amax, so that the scale of a tensor of zeros is finite."""


def plain_amax(x: Tensor) -> Tensor:
    return x.abs().amax().float()


def plain_cast(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    top = torch.finfo(dtype).max
    # A tensor: torch divides a Python number by multiplying it with the reciprocal.
    scale = torch.full_like(amax, top) / amax.clamp_min(SMALLEST_AMAX)
    return (x.float() * scale).clamp(-top, top).to(dtype), scale.reciprocal()


def plain_cast_both(x_RC: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x in fp8 by rows [R, C] and by columns [C, R], both contiguous, and the inverse scale."""
    rows_RC, inverse_scale = plain_cast(x_RC, amax, dtype)
    return rows_RC, rows_RC.t().contiguous(), inverse_scale


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
AMAX_BLOCK, AMAX_PROGRAMS, AMAX_WARPS = 8192, 132 * 4, 8
ROWS, COLUMNS, WARPS = 64, 128, 8


class Operand(NamedTuple):
    values: Tensor
    inverse_scale: Tensor
    """float32, a scalar on the device: values * inverse_scale restores the tensor."""


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of x, a float32 scalar on its device, the same bits each time; NaN if any element is."""
    _refuse_other_formats(x)
    found: Tensor = torch.ops.steplab.amax(x)
    return found


def cast_both(x_RC: Tensor, amax: Tensor, dtype: torch.dtype = E4M3) -> tuple[Operand, Operand]:
    """x in fp8 by rows [R, C] and by columns [C, R], in one pass over x."""
    _refuse_other_formats(x_RC)
    rows_RC, columns_CR, inverse_scale = torch.ops.steplab.fp8_cast_both(x_RC, amax, dtype)
    return Operand(rows_RC, inverse_scale), Operand(columns_CR, inverse_scale)


def _refuse_other_formats(x: Tensor) -> None:
    if x.dtype != torch.bfloat16:
        shown = str(x.dtype).removeprefix("torch.")
        raise Unsupported(f"fp8 from {shown}", "scales and casts take bfloat16", "cast to it first")


def _amax(x: Tensor) -> Tensor:
    if not runs_on(x.device.type):
        return plain_amax(x)
    from .kernels import amax_kernel

    x = x.contiguous()
    found = x.new_zeros((), dtype=torch.float32)
    if x.numel():
        programs = min(AMAX_PROGRAMS, -(-x.numel() // AMAX_BLOCK))
        with on_device_of(x):
            amax_kernel[programs,](x, found, x.numel(), BLOCK=AMAX_BLOCK, enable_fp_fusion=True, num_warps=AMAX_WARPS)
    return found


def _cast_both(x_RC: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_on(x_RC.device.type):
        return plain_cast_both(x_RC, amax, dtype)
    from .kernels import cast_both_kernel

    x_RC = x_RC.contiguous()
    rows_RC, columns_CR, inverse_scale = _fake_cast_both(x_RC, amax, dtype)
    num_rows, width = x_RC.shape
    with on_device_of(x_RC):
        cast_both_kernel[-(-width // COLUMNS), -(-num_rows // ROWS)](
            x_RC, amax, rows_RC, columns_CR, inverse_scale, num_rows, width,
            SMALLEST_AMAX=SMALLEST_AMAX, TOP=torch.finfo(dtype).max, ROWS=ROWS, COLUMNS=COLUMNS,
            enable_fp_fusion=True, num_warps=WARPS,
        )  # fmt: skip
    return rows_RC, columns_CR, inverse_scale


def _fake_amax(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def _fake_cast_both(x_RC: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows_RC, columns_CR = (x_RC.new_empty(shape, dtype=dtype) for shape in (x_RC.shape, x_RC.shape[::-1]))
    return rows_RC, columns_CR, torch.empty_like(amax)


define("amax", "(Tensor x) -> Tensor", _amax, _fake_amax)
define(
    "fp8_cast_both",
    "(Tensor x, Tensor amax, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _cast_both,
    _fake_cast_both,
)
