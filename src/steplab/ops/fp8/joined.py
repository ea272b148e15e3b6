"""Linear layers in fp8 together with what stands between them and attention, where largest magnitudes are handed on.

A tensor that one kernel writes and the next casts is read once more for its largest magnitude, unless the kernel that
writes it gives that too. Autograd hands on gradients alone, so that a layer and what produces its gradient are one
Function here: SwiGLU between its two layers, and rotary embedding after the merged projection.

    from add_rms_norm_amax: x          fp8_heads, fp8_swiglu
    from swiglu_amax: h                the layer down
    in the backward pass: d merged     from rotary_heads_backward_amax
                          d gate_up    from swiglu_backward_amax

Shape suffixes: B batch, T tokens, K inputs, F inner width, N outputs, E (H + 2 N) D: rotary_heads.
"""

from typing import Any

import torch
from torch import Tensor

from ..rotary_heads import rotary_heads, rotary_heads_backward_amax
from ..swiglu import swiglu_amax, swiglu_backward_amax
from ..triton_device import refuse_second_derivative
from .casts import E5M2
from .linear import INSTEAD, WeightGradient, input_and_weight_gradients, output, refuse_sizes


def fp8_swiglu(
    x: Tensor,
    gate_up_2FK: Tensor,
    down_NF: Tensor,
    *,
    x_amax: Tensor | None = None,
    gradients: torch.dtype = E5M2,
    weight_gradient: WeightGradient = "fp8",
) -> Tensor:
    """x [..., K] -> [..., N]: fp8_linear(swiglu(fp8_linear(x, gate_up)), down), whose arguments and errors it has."""
    refuse_sizes(x, gate_up_2FK)
    refuse_sizes(x, down_NF)
    y_TN: Tensor = _Fp8SwiGLU.apply(x.flatten(0, -2), x_amax, gate_up_2FK, down_NF, gradients, weight_gradient)  # type: ignore[no-untyped-call]
    return y_TN.unflatten(0, x.shape[:-1])


def fp8_heads(
    x_BTK: Tensor,
    weight_EK: Tensor,
    table_2TD: Tensor,
    num_heads: int,
    *,
    x_amax: Tensor | None = None,
    gradients: torch.dtype = E5M2,
    weight_gradient: WeightGradient = "fp8",
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: rotary_heads(fp8_linear(x, weight), table, num_heads), whose arguments and errors it
    has."""
    refuse_sizes(x_BTK, weight_EK)
    found: tuple[Tensor, Tensor, Tensor] = _Fp8Heads.apply(  # type: ignore[no-untyped-call]
        x_BTK, x_amax, weight_EK, table_2TD, num_heads, gradients, weight_gradient
    )
    return found


class _Fp8SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        x_amax: Tensor | None,
        gate_up_2FK: Tensor,
        down_NF: Tensor,
        gradients: torch.dtype,
        weight_gradient: WeightGradient,
    ) -> Tensor:
        joined_T2F, first = output(x_TK, x_amax, gate_up_2FK, weight_gradient)
        y_TN, second = output(*swiglu_amax(joined_T2F), down_NF, weight_gradient)
        ctx.save_for_backward(joined_T2F, *first, *second)
        ctx.dtypes = gradients, gate_up_2FK.dtype
        return y_TN

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_swiglu", INSTEAD)
        joined_T2F, *saved = ctx.saved_tensors
        first, second = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        dh_TF, d_down_NF = input_and_weight_gradients(dy_TN, None, second, *ctx.dtypes)
        d_joined = swiglu_backward_amax(dh_TF, joined_T2F)
        dx_TK, d_gate_up_2FK = input_and_weight_gradients(*d_joined, first, *ctx.dtypes)
        return dx_TK, None, d_gate_up_2FK, d_down_NF, None, None


class _Fp8Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTK: Tensor,
        x_amax: Tensor | None,
        weight_EK: Tensor,
        table_2TD: Tensor,
        num_heads: int,
        gradients: torch.dtype,
        weight_gradient: WeightGradient,
    ) -> tuple[Tensor, Tensor, Tensor]:
        merged_TE, saved = output(x_BTK.flatten(0, 1), x_amax, weight_EK, weight_gradient)
        ctx.save_for_backward(table_2TD, *saved)
        ctx.dtypes = gradients, weight_EK.dtype
        return rotary_heads(merged_TE.unflatten(0, x_BTK.shape[:2]), table_2TD, num_heads)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_heads", INSTEAD)
        table_2TD, *saved = ctx.saved_tensors
        d_merged_BTE, largest = rotary_heads_backward_amax(dq, dk, dv, table_2TD)
        dx_TK, dw_EK = input_and_weight_gradients(d_merged_BTE.flatten(0, 1), largest, saved, *ctx.dtypes)
        return dx_TK.unflatten(0, d_merged_BTE.shape[:2]), None, dw_EK, None, None, None, None
