"""Softmax, loss and gradient of rows of logits in plain PyTorch: the reference of the kernel in triton_rows.py.

Shape suffixes: n tokens, V entries of the vocabulary, 1 a dimension of one.
"""

import torch
from torch import Tensor

from steplab.ops.cross_entropy.chunks import Terms


def plain_rows(logits_nV: Tensor, targets_n: Tensor, losses_n: Tensor, scale_n: Tensor | None, terms: Terms) -> None:
    """A RowStep (see chunks.py)."""
    num_entries = logits_nV.shape[1]
    x_nV = logits_nV.to(losses_n.dtype)
    is_ignored_n1 = (targets_n == terms.ignore_index).unsqueeze(1)
    is_entry_n1 = ((targets_n >= 0) & (targets_n < num_entries)).unsqueeze(1)
    index_n1 = targets_n.unsqueeze(1).clamp(0, num_entries - 1)
    largest_n1 = x_nV.amax(1, keepdim=True)
    # All differences are from the largest logit: the log-sum-exp itself is rounded by as much as the logits are large.
    below_nV = x_nV - largest_n1
    at_target_n1 = below_nV.gather(1, index_n1)
    mean_n1 = below_nV.mean(1, keepdim=True) if terms.label_smoothing else 0.0
    exponentials_nV = below_nV.exp_()
    sum_n1 = exponentials_nV.sum(1, keepdim=True)
    lse_n1 = sum_n1.log() + largest_n1

    smoothing = terms.label_smoothing
    loss_n1 = sum_n1.log() - (1 - smoothing) * at_target_n1 + terms.z_loss * lse_n1.square()
    if smoothing:
        loss_n1 = loss_n1 - smoothing * mean_n1
    loss_n1 = torch.where(is_entry_n1, loss_n1, torch.nan).masked_fill(is_ignored_n1, 0)
    losses_n.copy_(loss_n1.squeeze(1))
    if scale_n is None:
        return

    gradient_nV = exponentials_nV.mul_((1 + 2 * terms.z_loss * lse_n1) / sum_n1)
    if smoothing:
        gradient_nV.sub_(smoothing / num_entries)
    gradient_nV.scatter_add_(1, index_n1, torch.full_like(at_target_n1, smoothing - 1))
    gradient_nV.mul_(scale_n.unsqueeze(1)).masked_fill_(is_ignored_n1, 0)
    logits_nV.copy_(gradient_nV)
