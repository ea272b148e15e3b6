"""The largest magnitude of a tensor, as a by-product of the kernel that writes it: what ops/fp8 scales it by.

Magnitudes are compared by their bits as int32: in the order of the numbers, with NaN above infinity. No maximum depends
on the order of programs, so that the same bits come in every run. A program reads the maximum first, and few of them
are above it: atomic operations on one address, one for each program, would take longer than some of the kernels.
"""

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """int32, for each element of a format of at most 32 bits."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_so_far(amax_ptr):
    """Bits of what amax [1] holds, float32 and 0 before the kernel; past the L1 cache, whose copy may be old."""
    return tl.load(amax_ptr.to(tl.pointer_type(tl.int32)), cache_modifier=".cg")


@triton.jit
def raise_amax(amax_ptr, so_far, bits):
    """amax becomes the largest of itself and of a tile, whose magnitude_bits these are."""
    top = tl.max(bits)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), top, mask=top > so_far, sem="relaxed")
