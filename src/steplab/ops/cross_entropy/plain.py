"""The loss as the formula reads: the logits are a tensor in memory. The reference, and what chunks save.

Shape suffixes: N tokens, C width of the hidden state, V entries of the vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear


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
