"""A linear layer whose three products are of fp8 operands, each scaled by its own largest magnitude now.

A product of fp8 on Hopper sums over the dimension along which both of its operands are contiguous, so that each tensor
is needed by rows in one product and by columns in another:

    y  = x  wᵀ      sums over K: x by rows,    w by rows
    dx = dy w       sums over N: dy by rows,   w by columns
    dw = dyᵀ x      sums over T: dy by columns, x by columns

Magnitudes of weights and activations are in e4m3, those of gradients, which vary more, in e5m2. Sums of the forward
product are kept to 14 bits (fast accumulation), those of gradients in float32.

Shape suffixes: T tokens, K inputs, N outputs of the layer.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import Unsupported
from ..triton_device import refuse_second_derivative
from .casts import E5M2, Operand, amax, cast, cast_both

MULTIPLE = 16
"""Tokens, inputs and outputs are multiples of this: operands are read by 16 bytes."""
_INSTEAD = "use torch.nn.functional.linear"


def fp8_linear(
    x: Tensor, weight_NK: Tensor, *, gradients: torch.dtype = E5M2, weight_gradient: Literal["fp8", "bf16"] = "fp8"
) -> Tensor:
    """x [..., K] -> [..., N], in the format of x.

    gradients: the format to which that of the output is cast. weight_gradient: bf16 takes x and the gradient in their
    own format, so that neither is needed by columns. Saved for the backward pass are the weight by columns, and x by
    columns in fp8, or as it is. Raises Unsupported if T, K or N is not a multiple of 16.
    """
    sizes = (x.numel() // x.shape[-1], x.shape[-1], weight_NK.shape[0])
    if any(size % MULTIPLE for size in sizes):
        why = f"tokens, inputs and outputs must be multiples of {MULTIPLE}, not {sizes}"
        raise Unsupported("fp8_linear of these sizes", why, _INSTEAD)
    wide = weight_gradient == "bf16"
    y_TN: Tensor = _Fp8Linear.apply(x.flatten(0, -2), weight_NK, gradients, wide)  # type: ignore[no-untyped-call]
    return y_TN.unflatten(0, x.shape[:-1])


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, gradients: torch.dtype, wide: bool) -> Tensor:
        w8_NK, w8_KN = cast_both(w_NK, amax(w_NK))
        if wide:
            x8_TK = cast(x_TK, amax(x_TK))
            ctx.save_for_backward(*w8_KN, x_TK)
        else:
            x8_TK, x8_KT = cast_both(x_TK, amax(x_TK))
            ctx.save_for_backward(*w8_KN, *x8_KT)
        ctx.gradients, ctx.weight_dtype = gradients, w_NK.dtype
        return product(x8_TK, w8_NK, x_TK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, Tensor, None, None]:
        refuse_second_derivative("fp8_linear", _INSTEAD)
        w8_KN, x = Operand(*ctx.saved_tensors[:2]), ctx.saved_tensors[2:]
        if len(x) == 1:
            dy8_TN = cast(dy_TN, amax(dy_TN), ctx.gradients)
            dw_NK = (dy_TN.t() @ x[0]).to(ctx.weight_dtype)
        else:
            dy8_TN, dy8_NT = cast_both(dy_TN, amax(dy_TN), ctx.gradients)
            dw_NK = product(dy8_NT, Operand(*x), ctx.weight_dtype)
        return product(dy8_TN, w8_KN, dy_TN.dtype), dw_NK, None, None


def product(a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a [M, S], b [N, S] -> a bᵀ [M, N]. fast: sums of 14 bits, which Hopper's tensor cores take in less time."""
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.inverse_scale,
        scale_b=b.inverse_scale,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
