"""RMSNorm with the sum before it as the formula reads (Zhang and Sennrich 2019)."""

from torch import Tensor


def plain_add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s / sqrt(mean(s^2) + eps) * weight over the last dimension for s = x + branch, and s."""
    total = x + branch
    return total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight, total
