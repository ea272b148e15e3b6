"""The kernels of SwiGLU, forward and backward: each reads its inputs once and writes its output once.

A program has a tile of rows and columns of the inner width, and reads it from both halves of the joined tensor.
"""

import triton
import triton.language as tl

from .amax_kernels import amax_so_far, magnitude_bits, raise_amax


@triton.jit
def swiglu_kernel(joined_ptr, out_ptr, amax_ptr, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """silu(gate) * up: joined [rows, 2 width] -> out [rows, width], both contiguous.

    amax [1]: the largest magnitude of out, or None.
    """
    if amax_ptr is not None:
        so_far = amax_so_far(amax_ptr)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < num_rows) & (columns < width)
    gate_ptr = joined_ptr + rows * (2 * width) + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    out = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * width + columns, out, mask=inside)
    if amax_ptr is not None:
        raise_amax(amax_ptr, so_far, magnitude_bits(out))


@triton.jit
def swiglu_backward_kernel(
    grad_ptr, joined_ptr, grad_joined_ptr, amax_ptr, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The gradient of joined [rows, 2 width] for grad [rows, width], all contiguous; see plain_swiglu.

    amax [1]: the largest magnitude of that gradient, or None.
    """
    if amax_ptr is not None:
        so_far = amax_so_far(amax_ptr)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < num_rows) & (columns < width)
    places = rows * (2 * width) + columns
    grad = tl.load(grad_ptr + rows * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(joined_ptr + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined_ptr + places + width, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    kind = grad_joined_ptr.dtype.element_ty
    grad_gate = (grad * up * share * (1.0 + gate * (1.0 - share))).to(kind)
    grad_up = (grad * gate * share).to(kind)
    tl.store(grad_joined_ptr + places, grad_gate, mask=inside)
    tl.store(grad_joined_ptr + places + width, grad_up, mask=inside)
    if amax_ptr is not None:
        raise_amax(amax_ptr, so_far, tl.maximum(magnitude_bits(grad_gate), magnitude_bits(grad_up)))
