"""The mean of a gradient over ranks, of which this rank's and copies of the others' lie in memory here."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 4096
"""Numbers of a program, on a GPU."""


def mean_into(target: Tensor, own: Tensor, others: Sequence[Tensor]) -> None:
    """target = (own + others) / their number, summed in float32 (float64 of float64) in this order; all are flat.

    target may be own. `others` lie at equal distances, as the rows of a matrix do.
    """
    if target.device.type == "cuda" and target.dtype != torch.float64:
        distance = others[1].storage_offset() - others[0].storage_offset() if len(others) > 1 else 0
        grid = (-(-target.numel() // BLOCK),)
        _kernel()[grid](target, own, others[0], distance, target.numel(), OTHERS=len(others), BLOCK=BLOCK)
        return
    wide = torch.float64 if target.dtype == torch.float64 else torch.float32
    total = own.to(wide, copy=True)
    for other in others:
        total += other
    target.copy_(total / (len(others) + 1))


@cache
def _kernel() -> Any:
    """Triton is loaded where it is used: there is none on some machines that have no GPU."""
    from steplab.parallel.mean_kernel import mean_kernel

    return mean_kernel
