"""A mean of several rows of numbers, each read once and the mean written once."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["distance", "starts", "counts"])
def mean_kernel(target_ptr, others_ptr, distance, own_ptrs, starts, counts, OTHERS: tl.constexpr, BLOCK: tl.constexpr):
    """target = (own + each of OTHERS rows, `distance` numbers apart) / (OTHERS + 1), summed in float32 at least.

    Of each piece at its start, in units of 16 bytes; a program makes a block of one of them. Places are counted in 64
    bits: a piece may have more than 2^31 numbers, and one that has almost as many would exceed them when rounded up.
    """
    block, own_ptr = tl.program_id(0).to(tl.int64), own_ptrs[0]
    start, count = starts[0].to(tl.int64), counts[0].to(tl.int64)
    blocks = tl.cdiv(count, BLOCK)
    for i in tl.static_range(1, len(own_ptrs)):
        further = block >= blocks
        block -= tl.where(further, blocks, 0)
        own_ptr, start, count = (
            tl.where(further, own_ptrs[i], own_ptr),
            tl.where(further, starts[i], start),
            tl.where(further, counts[i], count),
        )
        blocks = tl.cdiv(count, BLOCK)
    first = block * BLOCK
    unit: tl.constexpr = 16 // (target_ptr.dtype.element_ty.primitive_bitwidth // 8)
    skipped = start * unit + first
    if first + BLOCK <= count:
        _mean(target_ptr + skipped, own_ptr + first, others_ptr + skipped, distance, BLOCK, OTHERS, BLOCK)
    else:
        _mean(target_ptr + skipped, own_ptr + first, others_ptr + skipped, distance, count - first, OTHERS, BLOCK)


@triton.jit
def _mean(target_ptr, own_ptr, others_ptr, distance, count, OTHERS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the mean of one block's first `count` numbers; with a constant count the compiler removes the mask."""
    places = tl.arange(0, BLOCK)
    inside = places < count
    total = tl.load(own_ptr + places, mask=inside, other=0.0)
    if total.dtype != tl.float64:
        total = total.to(tl.float32)
    for row in tl.static_range(OTHERS):
        total += tl.load(others_ptr + row * distance.to(tl.int64) + places, mask=inside, other=0.0).to(total.dtype)
    tl.store(target_ptr + places, (total / (OTHERS + 1)).to(target_ptr.dtype.element_ty), mask=inside)
