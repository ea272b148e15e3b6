"""The kernels of the fused loss: softmax, loss and gradient of rows of logits, and a gradient times a number.

A program reads its row for the log-sum-exp, and again, mostly from the L2 cache, to overwrite it by its gradient. Each
lane keeps a running maximum and a sum relative to it, and lanes combine them once a row (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"). Exponentials are powers of two, which the hardware has. Only a logit's
difference from the largest is rounded: rounding logits near 10,000 would leave the softmax three digits.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e38)
"""Start of the running maximum: finite, so that a difference from it is a number."""


@triton.jit
def _taken_in(x, largest, total):
    # One exponential for both cases: either x is the new maximum and the sum shrinks, or x adds a part of it.
    ratio = tl.exp2(-tl.abs(x - largest) * LOG2_E)
    total = tl.where(x > largest, total * ratio + 1.0, total + ratio)
    return tl.maximum(largest, x), total


@triton.jit
def _gradient(x, top, log_2, factor, uniform, is_target, target_part, scale):
    gradient = tl.exp2((x - top) * LOG2_E - log_2) * factor - uniform
    return tl.where(is_target, gradient - target_part, gradient) * scale


@triton.jit
def cross_entropy_softmax_kernel(
    logits_ptr,
    row_stride,
    targets_ptr,
    losses_ptr,
    scale_ptr,
    scale_stride,
    num_entries,
    ignore_index,
    label_smoothing,
    z_loss,
    SMOOTHED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Losses of rows of logits, which are overwritten by their gradients; formulas in Terms."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    target = tl.load(targets_ptr + row)
    columns = tl.arange(0, BLOCK)
    whole = num_entries // BLOCK * BLOCK
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if WITH_GRADIENT:
            zeros = tl.zeros([BLOCK], row_ptr.dtype.element_ty)
            for start in range(0, num_entries, BLOCK):
                tl.store(row_ptr + start + columns, zeros, mask=start + columns < num_entries)
    else:
        is_entry = (target >= 0) & (target < num_entries)
        at_target = tl.load(row_ptr + target, mask=is_entry, other=float("nan")).to(tl.float32)
        # The row is summed as differences from `base`, any finite number. If the target's own logit is -inf it is 0: a
        # number as low as LOWEST would overflow the sum, and turn a loss of +inf into NaN.
        base = tl.where(at_target > LOWEST, at_target, 0.0)
        largest = tl.full([BLOCK], LOWEST, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        plain_total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, whole, BLOCK):
            x = tl.load(row_ptr + start + columns).to(tl.float32)
            largest, total = _taken_in(x, largest, total)
            if SMOOTHED:
                plain_total += x - base
        if whole < num_entries:
            inside = whole + columns < num_entries
            x = tl.load(row_ptr + whole + columns, mask=inside, other=float("-inf")).to(tl.float32)
            largest, total = _taken_in(x, largest, total)
            if SMOOTHED:
                plain_total += tl.where(inside, x - base, 0.0)
        top = tl.max(largest, 0)
        log_2 = tl.log2(tl.sum(total * tl.exp2((largest - top) * LOG2_E), 0))
        lse = top + log_2 * LN_2
        loss = log_2 * LN_2 + (1.0 - label_smoothing) * (top - at_target) + z_loss * lse * lse
        if SMOOTHED:
            loss += label_smoothing * ((top - base) - tl.sum(plain_total, 0) / num_entries)
        tl.store(losses_ptr + row, loss)
        if WITH_GRADIENT:
            scale = tl.load(scale_ptr + row * scale_stride)
            factor = 1.0 + 2.0 * z_loss * lse
            uniform = label_smoothing / num_entries
            target_part = 1.0 - label_smoothing
            for start in range(0, whole, BLOCK):
                x = tl.load(row_ptr + start + columns).to(tl.float32)
                is_target = start + columns == target
                gradient = _gradient(x, top, log_2, factor, uniform, is_target, target_part, scale)
                tl.store(row_ptr + start + columns, gradient.to(row_ptr.dtype.element_ty))
            if whole < num_entries:
                inside = whole + columns < num_entries
                x = tl.load(row_ptr + whole + columns, mask=inside, other=float("-inf")).to(tl.float32)
                is_target = whole + columns == target
                gradient = _gradient(x, top, log_2, factor, uniform, is_target, target_part, scale)
                tl.store(row_ptr + whole + columns, gradient.to(row_ptr.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_scale_kernel(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    """x *= factor; a factor of 1 reads and writes nothing."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        places = tl.arange(0, BLOCK)
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
            inside = start + places < count
            x = tl.load(x_ptr + start + places, mask=inside)
            tl.store(x_ptr + start + places, (x.to(tl.float32) * factor).to(x.dtype), mask=inside)
