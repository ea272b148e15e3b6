"""linear_cross_entropy(): one signature over every implementation, chosen by name and never swapped silently.

Chunked losses with a reduction form and save their gradients in the forward pass; backward multiplies them in place by
the gradient of the loss. Without a reduction each token has its own gradient of the loss, unknown in the forward pass,
so inputs are saved and backward recomputes the logits.

Shape suffixes: N tokens, C width of the hidden state, V entries of the vocabulary.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from .cross_entropy_chunks import OPERATORS, sum_dtype
from .errors import Unsupported, UserError
from .triton_device import refuse_func_grad, refuse_second_derivative
from .triton_places import NAMES


def plain_linear_cross_entropy(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """cross_entropy(hidden W^T + b, targets), with z_loss times the square of each token's log-sum-exp added."""
    logits_NV = linear(hidden_NC, weight_VC, bias_V)
    loss = cross_entropy(
        logits_NV, targets_N, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    if not z_loss:
        return loss
    is_valid_N = targets_N != ignore_index
    squares_N = torch.where(is_valid_N, logits_NV.logsumexp(1).square(), 0.0)
    if reduction == "none":
        return loss + z_loss * squares_N
    return loss + z_loss * squares_N.sum() / (is_valid_N.sum() if reduction == "mean" else 1)


_REFUSED = "a chunked loss", "choose plain for it"
_NOTHING = (None,) * 7
# Both Functions take the operators' `terms`: ignore_index, label_smoothing, z_loss and dtype.


class ReducedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        mean: bool,
        name: str,
        *terms: Any,
    ) -> Tensor:
        ignore_index, *_, dtype = terms
        wanted = [*ctx.needs_input_grad[:2], bias_V is not None and ctx.needs_input_grad[2]]
        scale, in_backward = _scales(targets_N, mean, ignore_index, dtype)
        losses_N, *gradients = OPERATORS[name].losses(
            hidden_NC, weight_VC, bias_V, targets_N, scale.expand(targets_N.shape[0]), *terms, wanted
        )
        ctx.name, ctx.wanted = name, wanted
        ctx.dtypes = hidden_NC.dtype, weight_VC.dtype, None if bias_V is None else bias_V.dtype
        ctx.save_for_backward(*gradients, in_backward)
        return reduced(losses_N, targets_N, mean=mean, ignore_index=ignore_index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(*_REFUSED)
        *gradients, in_backward = ctx.saved_tensors
        factor = grad if in_backward is None else grad * in_backward
        return *(
            _scaled(gradient, factor, ctx.name).to(dtype) if asked else None
            for gradient, dtype, asked in zip(gradients, ctx.dtypes, ctx.wanted, strict=True)
        ), *_NOTHING


class TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, name: str, *terms: Any
    ) -> Tensor:
        ctx.name, ctx.terms = name, terms
        ctx.save_for_backward(hidden_NC, weight_VC, bias_V, targets_N)
        losses_N, *_ = OPERATORS[name].losses(hidden_NC, weight_VC, bias_V, targets_N, None, *terms, [False] * 3)
        return losses_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(*_REFUSED)
        inputs = ctx.saved_tensors
        hidden_NC, weight_VC, bias_V, targets_N = inputs
        wanted = [*ctx.needs_input_grad[:2], bias_V is not None and ctx.needs_input_grad[2]]
        _, *gradients = OPERATORS[ctx.name].losses(hidden_NC, weight_VC, bias_V, targets_N, grad_N, *ctx.terms, wanted)
        return *(
            gradient.to(tensor.dtype) if asked else None
            for gradient, tensor, asked in zip(gradients, inputs, wanted, strict=False)
        ), *_NOTHING[1:]


def reduced(losses_N: Tensor, targets_N: Tensor, *, mean: bool, ignore_index: int) -> Tensor:
    """The sum of the losses, or their mean over targets that are not ignored; NaN if all are."""
    total = losses_N.sum()
    return total / (targets_N != ignore_index).sum() if mean else total


def _scales(targets_N: Tensor, mean: bool, ignore_index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The factor of each token's gradient in the forward pass; the factor of all gradients in backward, or None.

    The number of targets stays on the device. If the logits' gradients are fp16, a mean is divided by it in backward,
    because smaller gradients would round to zero.
    """
    one = torch.ones((), dtype=sum_dtype(dtype), device=targets_N.device)
    if not mean:
        return one, None
    share = one / (targets_N != ignore_index).sum().clamp(min=1)
    return (one, share) if dtype == torch.float16 else (share, None)


def _scaled(gradient: Tensor, factor: Tensor, name: str) -> Tensor:
    # The compiler decides on memory itself. Torch has no public way to read this setting.
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return (gradient * factor).to(gradient.dtype)
    OPERATORS[name].scale(gradient, factor)
    return gradient


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
        weight: [V, C], of hidden's type, or under autocast any of the first three.
        targets: [...] in int64, entries of the vocabulary.
        bias: [V] of weight's type, or None.
        reduction: mean over the targets that are not ignored, sum, or none.
        ignore_index: a token with this target has no loss and no gradient.
        label_smoothing: weight of the uniform distribution in the targets, from 0 to 1.
        z_loss: weight of the squared log-sum-exp of a token's logits, which is added to its loss.
        implementation: a name of the table in triton_places.py.

    Returns:
        The loss: a number, or [...] without a reduction. Chunked implementations return float32 (float64 for float64);
        plain returns the format of torch's cross_entropy.

    Under autocast the products take their factors in its type, and the gradient of a float32 weight is summed in
    float32. Gradients of a mean or a sum in chunks occupy memory from the forward pass on.

    Raises UserError for tensors of other shapes, types or devices, and Unsupported for an unknown name and for inputs
    that the named implementation does not support.
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
        refuse_func_grad(*_REFUSED)
    if has_gradient and reduction != "none":
        return ReducedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_NC, weight, bias, targets_N, mean, implementation, *terms
        )
    if has_gradient:
        losses_N = TokenLosses.apply(  # type: ignore[no-untyped-call]
            hidden_NC, weight, bias, targets_N, implementation, *terms
        )
    else:
        losses_N, *_ = OPERATORS[implementation].losses(hidden_NC, weight, bias, targets_N, None, *terms, [False] * 3)
    if reduction == "none":
        return losses_N.view(targets.shape)
    return reduced(losses_N, targets_N, mean=mean, ignore_index=ignore_index)


def _checked(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str, label_smoothing: float
) -> torch.dtype:
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
