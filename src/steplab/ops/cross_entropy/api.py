"""linear_cross_entropy(): one signature over every implementation, chosen by name and never swapped silently."""

from typing import Literal

import torch
from torch import Tensor

from steplab.errors import Unsupported, UserError
from steplab.ops.cross_entropy.functions import ReducedLoss, TokenLosses, reduced
from steplab.ops.cross_entropy.implementations import NAMES
from steplab.ops.cross_entropy.operators import OPERATORS
from steplab.ops.cross_entropy.plain import plain_linear_cross_entropy
from steplab.ops.triton_device import refuse_func_grad

Reduction = Literal["mean", "sum", "none"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    implementation: str = "chunked",
) -> Tensor:
    """cross_entropy(hidden weight^T + bias, targets), by the named implementation.

    Args:
        hidden: [..., C] in float32, bfloat16, float16 or float64.
        weight: [V, C], of hidden's type, or under autocast of any of the first three.
        targets: [...] in int64, entries of the vocabulary.
        bias: [V] of weight's type, or None.
        reduction: mean over the targets that are not ignored, sum, or none.
        ignore_index: a token with this target has no loss and no gradient.
        label_smoothing: weight of the uniform distribution in the targets, from 0 to 1.
        z_loss: weight of the squared log-sum-exp of a token's logits, which is added to its loss.
        implementation: a name of the table in implementations.py.

    Returns:
        The loss: a number, or [...] without a reduction. Those in chunks give float32 (float64 for float64); plain
        gives what torch's cross_entropy does.

    Under autocast the products take their factors in its type, and the gradient of a float32 weight is summed in
    float32. The gradients of a mean or a sum in chunks are formed in the forward pass, where they take memory from then
    on.

    Raises UserError for tensors of other shapes, types or devices, and Unsupported for a name that is not known and for
    inputs that the named implementation does not serve.
    """
    if implementation not in NAMES:
        raise Unsupported(f"loss '{implementation}'", "no such implementation", f"choose one of {', '.join(NAMES)}")
    dtype = _checked(hidden, weight, targets, bias, reduction, label_smoothing)
    hidden_NC, targets_N = hidden.flatten(0, -2), targets.flatten()
    if implementation == "plain":
        loss = plain_linear_cross_entropy(
            hidden_NC, weight, targets_N, bias,
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
        )  # fmt: skip
        return loss.view(targets.shape) if reduction == "none" else loss
    terms = ignore_index, label_smoothing, z_loss, dtype
    mean = reduction == "mean"
    has_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    if has_gradient:
        refuse_func_grad("a chunked loss", "choose plain for it")
    if has_gradient and reduction != "none":
        return ReducedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_NC, weight, bias, targets_N, mean, *terms, implementation
        )
    if has_gradient:
        losses_N = TokenLosses.apply(  # type: ignore[no-untyped-call]
            hidden_NC, weight, bias, targets_N, *terms, implementation
        )
    else:
        losses_N, *_ = OPERATORS[implementation].losses(hidden_NC, weight, bias, targets_N, None, *terms, [False] * 3)
    if reduction == "none":
        return losses_N.view(targets.shape)
    return reduced(losses_N, targets_N, mean=mean, ignore_index=ignore_index)


def _checked(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str, label_smoothing: float
) -> torch.dtype:
    """The number format of the products. Raises UserError, saying what to change, for inputs that do not fit."""
    given = [hidden, weight] if bias is None else [hidden, weight, bias]
    shown = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise UserError(f"linear_cross_entropy takes hidden [..., C] and weight [V, C], not {shown}")
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise UserError(f"linear_cross_entropy takes a target in int64 for each hidden state, not {shown}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(f"linear_cross_entropy takes a bias [{weight.shape[0]}], not {list(bias.shape)}")
    if len({tensor.device for tensor in (*given, targets)}) > 1:
        raise UserError(f"linear_cross_entropy takes tensors of one device, not {shown} on several")
    if reduction not in ("mean", "sum", "none"):
        raise UserError(f"reduction '{reduction}' is not known; choose one of mean, sum, none")
    if not 0 <= label_smoothing <= 1:
        raise UserError(f"label_smoothing must be from 0 to 1, not {label_smoothing:g}")
    dtypes = {tensor.dtype for tensor in given}
    device = hidden.device.type
    low = torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None
    if low is not None and dtypes <= set(_DTYPES) - {torch.float64}:
        return low
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UserError(f"linear_cross_entropy takes tensors of one floating-point type, not {names}")
    return hidden.dtype
