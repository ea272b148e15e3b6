"""The kernels of the fused loss started: softmax, loss and gradient of rows, and gradients multiplied by a number.

Shape suffixes: n tokens, V entries of the vocabulary.
"""

import triton
from torch import Tensor

from steplab.ops.cross_entropy.chunks import Terms
from steplab.ops.cross_entropy.triton_kernels import cross_entropy_scale_kernel, cross_entropy_softmax_kernel
from steplab.ops.triton_device import on_device_of

BLOCK, NUM_WARPS = 16384, 32
"""Columns of a row at a time, and the warps that share them: 16 columns in 64 registers of a thread. It was the fastest
of eight on an H200, where a multiprocessor then has one row at a time (benchmarks/kernels.py cross_entropy --tiles)."""
SCALED_BLOCK, MOST_PROGRAMS = 8192, 1024


def triton_rows(logits_nV: Tensor, targets_n: Tensor, losses_n: Tensor, scale_n: Tensor | None, terms: Terms) -> None:
    """A RowStep (see chunks.py) for float32, bfloat16 and float16."""
    num_rows, num_entries = logits_nV.shape
    scale = losses_n if scale_n is None else scale_n
    block = BLOCK // 2 if terms.label_smoothing else BLOCK  # a further sum for each column
    with on_device_of(logits_nV):
        cross_entropy_softmax_kernel[(num_rows,)](
            logits_nV,
            logits_nV.stride(0),
            targets_n.contiguous(),  # a column of a batch, say, has them apart
            losses_n,
            scale,
            scale.stride(0),
            num_entries,
            terms.ignore_index,
            terms.label_smoothing,
            terms.z_loss,
            SMOOTHED=terms.label_smoothing > 0,
            WITH_GRADIENT=scale_n is not None,
            BLOCK=min(block, max(triton.next_power_of_2(num_entries), 32 * NUM_WARPS)),
            num_warps=NUM_WARPS,
        )


def triton_scale(x: Tensor, factor: Tensor) -> None:
    """x *= factor in place, for a contiguous tensor and a float32 number on its device."""
    if x.numel() == 0:
        return
    num_programs = min(triton.cdiv(x.numel(), SCALED_BLOCK), MOST_PROGRAMS)
    with on_device_of(x):
        cross_entropy_scale_kernel[(num_programs,)](x, factor, x.numel(), BLOCK=SCALED_BLOCK, num_warps=8)
