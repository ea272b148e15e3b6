"""The gradient of the chunked losses.

A mean or a sum has its gradients formed in the forward pass, where they are all that is saved; backward multiplies them
by the gradient of the loss, in place. Losses without a reduction have a gradient for each token, which is not known in
the forward pass: they save their inputs, and backward computes the logits again.

Shape suffixes: N tokens, C width of the hidden state, V entries of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from steplab.ops.cross_entropy.chunks import sum_dtype
from steplab.ops.cross_entropy.operators import OPERATORS
from steplab.ops.triton_device import refuse_second_derivative

_REFUSED = "a chunked loss", "choose plain for it"
"""What has no second derivative, and what to do instead."""
_NOTHING = (None,) * 7
"""Gradients of what is not differentiated: targets, and what the losses are made of."""


class ReducedLoss(torch.autograd.Function):
    """The mean or the sum of the losses, with gradients formed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        mean: bool,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        dtype: torch.dtype,
        name: str,
    ) -> Tensor:
        wanted = [*ctx.needs_input_grad[:2], bias_V is not None and ctx.needs_input_grad[2]]
        scale, in_backward = _scales(targets_N, mean, ignore_index, dtype)
        losses_N, *gradients = OPERATORS[name].losses(
            hidden_NC, weight_VC, bias_V, targets_N, scale.expand(targets_N.shape[0]),
            ignore_index, label_smoothing, z_loss, dtype, wanted,
        )  # fmt: skip
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
    """The losses of the tokens, whose logits backward computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        dtype: torch.dtype,
        name: str,
    ) -> Tensor:
        ctx.arguments = ignore_index, label_smoothing, z_loss, dtype
        ctx.name = name
        ctx.save_for_backward(hidden_NC, weight_VC, bias_V, targets_N)
        losses_N: Tensor = OPERATORS[name].losses(
            hidden_NC, weight_VC, bias_V, targets_N, None, *ctx.arguments, [False] * 3
        )[0]
        return losses_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(*_REFUSED)
        inputs = ctx.saved_tensors
        hidden_NC, weight_VC, bias_V, targets_N = inputs
        wanted = [*ctx.needs_input_grad[:2], bias_V is not None and ctx.needs_input_grad[2]]
        _, *gradients = OPERATORS[ctx.name].losses(
            hidden_NC, weight_VC, bias_V, targets_N, grad_N, *ctx.arguments, wanted
        )
        return *(
            gradient.to(tensor.dtype) if asked else None
            for gradient, tensor, asked in zip(gradients, inputs, wanted, strict=False)
        ), *_NOTHING[1:]


def reduced(losses_N: Tensor, targets_N: Tensor, *, mean: bool, ignore_index: int) -> Tensor:
    """The sum of the losses, or their mean over the targets that are not ignored, of which there should be one."""
    total = losses_N.sum()
    return total / (targets_N != ignore_index).sum() if mean else total


def _scales(targets_N: Tensor, mean: bool, ignore_index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """What each token's gradient is multiplied with in the forward pass, and all of them in the backward pass.

    The number of targets stays on the device. A mean's factor is left to the backward pass where the gradients of the
    logits are in fp16, in which the smaller ones would be zero.
    """
    one = torch.ones((), dtype=sum_dtype(dtype), device=targets_N.device)
    if not mean:
        return one, None
    share = one / (targets_N != ignore_index).sum().clamp(min=1)
    return (one, share) if dtype == torch.float16 else (share, None)


def _scaled(gradient: Tensor, factor: Tensor, name: str) -> Tensor:
    """The gradient times the factor: in its own memory, unless the graph is kept for another backward pass."""
    # The compiler decides on memory itself. Torch has no public way to ask for what it does.
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return (gradient * factor).to(gradient.dtype)
    OPERATORS[name].scale(gradient, factor)
    return gradient
