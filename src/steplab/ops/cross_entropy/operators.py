"""Losses and gradients in chunks as operators of torch: steplab::cross_entropy_chunked and its like of each name.

They have no derivative of their own: that is functions.py. For each implementation there is one that gives losses and
gradients, and one that multiplies a gradient by a number in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from steplab.ops.cross_entropy.chunks import RowStep, Terms, gradient_dtype, losses_in_chunks, sum_dtype
from steplab.ops.cross_entropy.plain_rows import plain_rows
from steplab.ops.torch_library import define
from steplab.ops.triton_device import refuse_unserved

_LOSSES = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? scale, int ignore_index, "
    "float label_smoothing, float z_loss, ScalarType dtype, bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor)"
)
_SCALE = "(Tensor(a!) gradient, Tensor factor) -> ()"


@dataclass(frozen=True, slots=True)
class Operators:
    """Those of an implementation."""

    losses: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    """(hidden [N, C], weight [V, C], bias [V] or None, targets [N], scale [N] or None, ignore_index, label_smoothing,
    z_loss, dtype, wanted) -> losses [N] and the gradients of hidden, weight and bias, as chunks.losses_in_chunks gives
    them; a gradient that is not wanted has no elements."""
    scale: Callable[[Tensor, Tensor], None]
    """(gradient, factor): multiplies a gradient in place by a number on its device."""


def _define(name: str, rows: RowStep, scale: Callable[[Tensor, Tensor], None]) -> Operators:
    def losses(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        dtype: torch.dtype,
        wanted: Sequence[bool],
    ) -> tuple[Tensor, ...]:
        terms = Terms(ignore_index, label_smoothing, z_loss)
        asked = (wanted[0], wanted[1], wanted[2])
        with torch.autocast(hidden.device.type, enabled=False):  # the products' formats are decided already
            found, gradients = losses_in_chunks(
                hidden, weight, bias, targets, scale, terms, dtype=dtype, wanted=asked, rows=rows
            )
        return found, *(hidden.new_empty(0) if gradient is None else gradient for gradient in gradients)

    whole = define(f"cross_entropy_{name}", _LOSSES, losses, _fake_losses)
    scaled = define(f"cross_entropy_{name}_scale", _SCALE, scale, _fake_scale)
    register_flop_formula(whole)(_flops)
    return Operators(whole.default, scaled.default)


def _fake_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    gradients = (
        hidden.new_empty(0)
        if tensor is None or scale is None or not asked
        else tensor.new_empty(tensor.shape, dtype=gradient_dtype(tensor))
        for tensor, asked in zip((hidden, weight, bias), wanted, strict=True)
    )
    return hidden.new_empty(hidden.shape[0], dtype=sum_dtype(dtype)), *gradients


def _fake_scale(gradient: Tensor, factor: Tensor) -> None:
    """Nothing is made."""


def _flops(
    hidden: Sequence[int],
    weight: Sequence[int],
    bias: Sequence[int] | None,
    targets: Sequence[int],
    scale: Sequence[int] | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    dtype: object,
    wanted: Sequence[bool],
    **kwargs: object,
) -> int:
    """FLOPs of the matrix products: one for the logits, and one for each of the larger gradients."""
    num_products = 1 + (0 if scale is None else sum(wanted[:2]))
    return 2 * num_products * hidden[0] * hidden[1] * weight[0]


def _triton_rows(logits_nV: Tensor, targets_n: Tensor, losses_n: Tensor, scale_n: Tensor | None, terms: Terms) -> None:
    refuse_unserved("loss 'fused'", logits_nV, "choose chunked or plain")
    from steplab.ops.cross_entropy.triton_rows import triton_rows

    triton_rows(logits_nV, targets_n, losses_n, scale_n, terms)


def _triton_scale(gradient: Tensor, factor: Tensor) -> None:
    from steplab.ops.cross_entropy.triton_rows import triton_scale

    triton_scale(gradient, factor)


def _plain_scale(gradient: Tensor, factor: Tensor) -> None:
    gradient.mul_(factor)


OPERATORS = {
    "chunked": _define("chunked", plain_rows, _plain_scale),
    "fused": _define("fused", _triton_rows, _triton_scale),
}
"""By the name of the implementation."""
