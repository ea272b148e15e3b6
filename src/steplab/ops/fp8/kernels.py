"""The kernels of casts to fp8; see casts.py. Each reads a tensor once.

Every program computes the scale from amax, so that nothing runs between the kernel of amax and the cast. For the cast
by columns the bf16 tile is transposed and cast again, instead of transposing the fp8 tile. The instructions that read
transposed matrices from shared memory take 16-bit elements; 8-bit elements would be read byte by byte.
"""

import triton
import triton.language as tl

from ..block_kernels import amax_so_far, magnitude_bits, raise_amax


@triton.jit
def amax_kernel(x_ptr, amax_ptr, num_elements, BLOCK: tl.constexpr):
    """The largest magnitude of x, which is contiguous -> amax [1], a float32 that is 0 before the kernel."""
    so_far = amax_so_far(amax_ptr)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    top = tl.zeros([BLOCK], tl.int32)
    for start in range(first, num_elements, tl.num_programs(0) * BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + places, mask=places < num_elements, other=0.0)
        top = tl.maximum(top, magnitude_bits(x))
    raise_amax(amax_ptr, so_far, top)


@triton.jit
def _scale(amax_ptr, inverse_scale_ptr, SMALLEST_AMAX: tl.constexpr, TOP: tl.constexpr):
    amax = tl.load(amax_ptr)
    scale = tl.div_rn(TOP, tl.where(amax < SMALLEST_AMAX, SMALLEST_AMAX, amax))
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(inverse_scale_ptr, tl.div_rn(1.0, scale))
    return scale


@triton.jit
def _scaled(x, scale, kind: tl.constexpr, TOP: tl.constexpr):
    return tl.clamp(x.to(tl.float32) * scale, -TOP, TOP, propagate_nan=tl.PropagateNan.ALL).to(kind)


@triton.jit
def cast_both_kernel(
    x_ptr, amax_ptr, rows_ptr, columns_ptr, inverse_scale_ptr, num_rows, width,
    SMALLEST_AMAX: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x [rows, width] -> rows [rows, width] and columns [width, rows] in fp8, all contiguous."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    places = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + places, mask=inside, other=0.0)
    scale = _scale(amax_ptr, inverse_scale_ptr, SMALLEST_AMAX, TOP)
    kind: tl.constexpr = rows_ptr.dtype.element_ty
    tl.store(rows_ptr + places, _scaled(x, scale, kind, TOP), mask=inside)
    inside = (column < width)[:, None] & (row < num_rows)[None, :]
    places = column[:, None] * num_rows + row[None, :]
    tl.store(columns_ptr + places, _scaled(tl.trans(x), scale, kind, TOP), mask=inside)
