"""A mean of several rows of numbers, each read once and the mean written once."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["distance", "count"])
def mean_kernel(target_ptr, own_ptr, others_ptr, distance, count, OTHERS: tl.constexpr, BLOCK: tl.constexpr):
    """target = (own + each of OTHERS rows, `distance` numbers apart) / (OTHERS + 1), summed in float32 at least."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    total = tl.load(own_ptr + places, mask=inside, other=0.0)
    if total.dtype != tl.float64:
        total = total.to(tl.float32)
    for row in tl.static_range(OTHERS):
        total += tl.load(others_ptr + row * distance.to(tl.int64) + places, mask=inside, other=0.0).to(total.dtype)
    tl.store(target_ptr + places, (total / (OTHERS + 1)).to(target_ptr.dtype.element_ty), mask=inside)
