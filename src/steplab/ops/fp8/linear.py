"""A linear layer with three fp8 products; each operand is scaled by its own current largest magnitude.

Hopper's fp8 products need both operands contiguous along the summed dimension, so each tensor is needed by rows in one
product and by columns in another:

    y  = x  wᵀ      sums over K: x by rows,    w by rows
    dx = dy w       sums over N: dy by rows,   w by columns
    dw = dyᵀ x      sums over T: dy by columns, x by columns

Weights and activations are in e4m3, gradients, which vary more, in e5m2. Sums of the forward product are kept to 14
bits (fast accumulation), of gradients in float32.

A cast reads its tensor twice, first for the largest magnitude, unless the kernel that made the tensor returned it.
Autograd passes on gradients without their magnitude. So fp8_heads and fp8_swiglu join layers and the operators behind
them in one Function, and cast these tensors with a known magnitude:

    tensor                     magnitude from                 cast in
    x, the normed input        add_rms_norm_amax (x_amax)     fp8_heads, fp8_swiglu
    h, the input of down       swiglu_amax                    fp8_swiglu
    d merged, in backward      rotary_heads_backward_amax     fp8_heads
    d gate_up, in backward     swiglu_backward_amax           fp8_swiglu

Shape suffixes: B batch, T tokens, K inputs, F inner width, N outputs of the layer, E (H + 2 N) D: rotary_heads.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from ..rotary_heads import rotary_heads, rotary_heads_backward_amax
from ..swiglu import swiglu_amax, swiglu_backward_amax
from ..triton_device import refuse_second_derivative
from ..triton_places import FP8_MULTIPLE
from .casts import E5M2, Operand, amax, cast_both

INSTEAD = "use torch.nn.functional.linear"


def fp8_linear(x: Tensor, weight_NK: Tensor, *, x_amax: Tensor | None = None) -> Tensor:
    """Return x wᵀ, [..., K] -> [..., N] in the dtype of x, from fp8 products.

    x_amax: the largest magnitude of x from its producer (add_rms_norm_amax); None: x is read for it. Saves wᵀ and xᵀ in
    fp8. Raises Unsupported unless tokens, K and N are multiples of 16.
    """
    refuse_sizes(x, weight_NK)
    y_TN: Tensor = _Fp8Linear.apply(x.flatten(0, -2), x_amax, weight_NK)  # type: ignore[no-untyped-call]
    return y_TN.unflatten(0, x.shape[:-1])


def refuse_sizes(x: Tensor, weight_NK: Tensor) -> None:
    sizes = (x.numel() // x.shape[-1], *weight_NK.t().shape)
    if any(size % FP8_MULTIPLE for size in sizes):
        why = f"tokens, inputs and outputs must be multiples of {FP8_MULTIPLE}, not {sizes}"
        raise Unsupported("fp8_linear of these sizes", why, INSTEAD)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, x_amax: Tensor | None, w_NK: Tensor) -> Tensor:
        y_TN, saved = output(x_TK, x_amax, w_NK)
        ctx.save_for_backward(*saved)
        ctx.weight_dtype = w_NK.dtype
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_linear", INSTEAD)
        dx_TK, dw_NK = input_and_weight_gradients(dy_TN, None, ctx.saved_tensors, ctx.weight_dtype)
        return dx_TK, None, dw_NK


def output(x_TK: Tensor, x_amax: Tensor | None, w_NK: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y [T, N], and tensors to save for backward: w and x in fp8 by columns, each followed by its inverse scale."""
    w8_NK, w8_KN = cast_both(w_NK, amax(w_NK))
    x8_TK, x8_KT = cast_both(x_TK, amax(x_TK) if x_amax is None else x_amax)
    return product(x8_TK, w8_NK, x_TK.dtype, fast=True), (*w8_KN, *x8_KT)


def input_and_weight_gradients(
    dy_TN: Tensor, dy_amax: Tensor | None, saved: tuple[Tensor, ...], weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dx [T, K] and dw [N, K]; `saved` comes from output()."""
    w8_KN, x8_KT = Operand(*saved[:2]), Operand(*saved[2:])
    dy8_TN, dy8_NT = cast_both(dy_TN, amax(dy_TN) if dy_amax is None else dy_amax, E5M2)
    return product(dy8_TN, w8_KN, dy_TN.dtype), product(dy8_NT, x8_KT, weight_dtype)


def product(a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """The product a bᵀ [M, N] of a [M, S] and b [N, S].

    `fast` keeps sums to 14 bits, which is faster on Hopper's tensor cores; a CPU sums in float32.
    """
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.inverse_scale,
        scale_b=b.inverse_scale,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def fp8_swiglu(x: Tensor, gate_up_2FK: Tensor, down_NF: Tensor, *, x_amax: Tensor | None = None) -> Tensor:
    """SwiGLU feed-forward x [..., K] -> [..., N]: fp8_linear(swiglu(fp8_linear(x, gate_up)), down), with the same
    arguments and errors.
    """
    refuse_sizes(x, gate_up_2FK)
    refuse_sizes(x, down_NF)
    y_TN: Tensor = _Fp8SwiGLU.apply(x.flatten(0, -2), x_amax, gate_up_2FK, down_NF)  # type: ignore[no-untyped-call]
    return y_TN.unflatten(0, x.shape[:-1])


def fp8_heads(
    x_BTK: Tensor, weight_EK: Tensor, table_2TD: Tensor, num_heads: int, *, x_amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: rotary_heads(fp8_linear(x, weight), table, num_heads), with the same arguments and
    errors.
    """
    refuse_sizes(x_BTK, weight_EK)
    found: tuple[Tensor, Tensor, Tensor] = _Fp8Heads.apply(  # type: ignore[no-untyped-call]
        x_BTK, x_amax, weight_EK, table_2TD, num_heads
    )
    return found


class _Fp8SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, x_amax: Tensor | None, gate_up_2FK: Tensor, down_NF: Tensor) -> Tensor:
        joined_T2F, first = output(x_TK, x_amax, gate_up_2FK)
        y_TN, second = output(*swiglu_amax(joined_T2F), down_NF)
        ctx.save_for_backward(joined_T2F, *first, *second)
        ctx.weight_dtype = gate_up_2FK.dtype
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_swiglu", INSTEAD)
        joined_T2F, *saved = ctx.saved_tensors
        first, second = saved[:4], saved[4:]
        dh_TF, d_down_NF = input_and_weight_gradients(dy_TN, None, second, ctx.weight_dtype)
        d_joined = swiglu_backward_amax(dh_TF, joined_T2F)
        dx_TK, d_gate_up_2FK = input_and_weight_gradients(*d_joined, first, ctx.weight_dtype)
        return dx_TK, None, d_gate_up_2FK, d_down_NF


class _Fp8Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTK: Tensor, x_amax: Tensor | None, weight_EK: Tensor, table_2TD: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        merged_TE, saved = output(x_BTK.flatten(0, 1), x_amax, weight_EK)
        ctx.save_for_backward(table_2TD, *saved)
        ctx.weight_dtype = weight_EK.dtype
        return rotary_heads(merged_TE.unflatten(0, x_BTK.shape[:2]), table_2TD, num_heads)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_heads", INSTEAD)
        table_2TD, *saved = ctx.saved_tensors
        d_merged_BTE, largest = rotary_heads_backward_amax(dq, dk, dv, table_2TD)
        dx_TK, dw_EK = input_and_weight_gradients(d_merged_BTE.flatten(0, 1), largest, saved, ctx.weight_dtype)
        return dx_TK.unflatten(0, d_merged_BTE.shape[:2]), None, dw_EK, None, None
