"""The kernels of RMSNorm with the sum before it, forward and backward.

A row is in a program's registers as a whole, so that its mean square costs no second pass over memory. In the backward
pass a program has several rows, and adds up their share of the weight's gradient in registers; the programs' shares are
added by another kernel in the order of the programs, so that results are the same bits in every run.
"""

import triton
import triton.language as tl

from .amax_kernels import amax_so_far, magnitude_bits, raise_amax


@triton.jit
def add_rms_norm_kernel(
    x_ptr, branch_ptr, weight_ptr, normed_ptr, sum_ptr, rstd_ptr, amax_ptr, width, eps, BLOCK: tl.constexpr
):
    """sum = x + branch, rstd = 1 / sqrt(mean(sum^2) + eps), normed = sum rstd weight, for rows of `width` elements.

    amax [1]: the largest magnitude of normed, or None.
    """
    if amax_ptr is not None:
        so_far = amax_so_far(amax_ptr)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(branch_ptr + places, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + places, x, mask=inside)
    x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    normed = (x * rstd * weight).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + places, normed, mask=inside)
    if amax_ptr is not None:
        raise_amax(amax_ptr, so_far, tl.where(inside, magnitude_bits(normed), 0))


@triton.jit
def add_rms_norm_backward_kernel(
    grad_ptr,
    grad_sum_ptr,
    sum_ptr,
    weight_ptr,
    rstd_ptr,
    grad_x_ptr,
    grad_branch_ptr,
    shares_ptr,
    num_rows,
    width,
    HAS_SUM: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With n = sum rstd and h = grad weight: grad_x = rstd (h - n mean(h n)) + grad_sum, and in the branch's format.

    grad is the gradient of normed, grad_sum that of the sum. shares [programs, width], float32: each program's sum of
    grad n over its rows, of which it has every num_programs-th.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        places = row * tl.cast(width, tl.int64) + columns
        grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(sum_ptr + places, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        n = x * rstd
        share += grad * n
        h = grad * weight
        grad_x = rstd * (h - n * (tl.sum(h * n, 0) / width))
        if HAS_SUM:
            grad_x += tl.load(grad_sum_ptr + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + places, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if HAS_BRANCH:
            tl.store(grad_branch_ptr + places, grad_x.to(grad_branch_ptr.dtype.element_ty), mask=inside)
    tl.store(shares_ptr + tl.program_id(0) * width + columns, share, mask=inside)


@triton.jit
def rms_norm_weight_kernel(shares_ptr, grad_weight_ptr, num_shares, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """grad_weight [width]: the sum of shares [num_shares, width] over the first dimension, always in the same order."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_shares, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        inside = (rows < num_shares) & (columns < width)
        total += tl.load(shares_ptr + rows * width + columns, mask=inside, other=0.0)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(grad_weight_ptr + columns, tl.sum(total, 0).to(grad_weight_ptr.dtype.element_ty), mask=columns < width)
