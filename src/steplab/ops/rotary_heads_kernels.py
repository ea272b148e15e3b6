"""The kernels that take a merged projection apart into heads with rotary embedding, and join their gradients.

A row of a tile is a head of a token. Rows are counted token by token, so that the heads of a program lie side by side
in memory, and they all read the same few rows of the table. Programs of queries come first, then keys, then values; to
which of them a program belongs is a branch that its threads take together.
"""

import triton
import triton.language as tl

from .amax_kernels import amax_so_far, magnitude_bits, raise_amax


@triton.jit
def _part(program, num_tokens, num_heads, num_kv_heads, head_dim, ROWS: tl.constexpr):
    """What a program works on: 0 queries, 1 keys, 2 values; its first row in these, their number of heads, and their
    first column in the merged projection."""
    of_queries = tl.cdiv(num_tokens * num_heads, ROWS)
    of_keys = tl.cdiv(num_tokens * num_kv_heads, ROWS)
    part = tl.where(program < of_queries, 0, tl.where(program < of_queries + of_keys, 1, 2))
    first = tl.where(part == 0, 0, tl.where(part == 1, of_queries, of_queries + of_keys))
    heads = tl.where(part == 0, num_heads, num_kv_heads)
    column = tl.where(part == 0, 0, tl.where(part == 1, num_heads, num_heads + num_kv_heads)) * head_dim
    return part, (program - first) * ROWS, heads, column


@triton.jit
def _angles(table_ptr, sine_distance, position, half, columns, inside, part):
    """Cosines and sines of the rows' positions; those of an angle of zero for values.

    Values turn in no column: a block is compared, as the interpreter of Triton 3.9 widens a scalar's comparison to
    int32, which is no mask.
    """
    places = position * half + columns
    turning = inside & (columns < tl.where(part < 2, half, 0))
    cosine = tl.load(table_ptr + places, mask=turning, other=1.0)
    sine = tl.load(table_ptr + sine_distance + places, mask=turning, other=0.0)
    return cosine, sine


@triton.jit
def _places(base_ptr, batch, position, head, of_batch, of_token, of_head):
    """Where rows begin, by the strides of batch, token and head; int64, for tensors of more than 2^31 elements."""
    places = batch * tl.cast(of_batch, tl.int64) + position * tl.cast(of_token, tl.int64)
    return base_ptr + places + head * tl.cast(of_head, tl.int64)


@triton.jit
def rotary_heads_kernel(
    merged_ptr,
    table_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    sine_distance,
    num_tokens,
    context,
    num_heads,
    num_kv_heads,
    head_dim,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """merged [tokens, (heads + 2 kv_heads) head_dim] -> q, k, v [tokens, heads, head_dim], all contiguous.

    table [2, positions, head_dim / 2] of cosines and sines, float32, whose sines are sine_distance further on; the
    position of a token is its number modulo context.
    """
    half = head_dim // 2
    part, first, heads, column = _part(tl.program_id(0), num_tokens, num_heads, num_kv_heads, head_dim, ROWS)
    rows = first + tl.arange(0, ROWS)[:, None]
    tokens = rows // heads
    columns = tl.arange(0, HALF)[None, :]
    inside = (tokens < num_tokens) & (columns < half)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    from_ptr = merged_ptr + tokens.to(tl.int64) * width + column + (rows % heads) * head_dim + columns
    a = tl.load(from_ptr, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(from_ptr + half, mask=inside, other=0.0).to(tl.float32)
    cosine, sine = _angles(table_ptr, sine_distance, tokens % context, half, columns, inside, part)
    kind = q_ptr.dtype.element_ty
    to_ptr = q_ptr
    if part == 1:
        to_ptr = k_ptr
    if part == 2:
        to_ptr = v_ptr
    to_ptr = to_ptr + rows.to(tl.int64) * head_dim + columns
    tl.store(to_ptr, (a * cosine - b * sine).to(kind), mask=inside)
    tl.store(to_ptr + half, (b * cosine + a * sine).to(kind), mask=inside)


@triton.jit
def rotary_heads_backward_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    table_ptr,
    grad_ptr,
    amax_ptr,
    sine_distance,
    q_batch, q_token, q_head,
    k_batch, k_token, k_head,
    v_batch, v_token, v_head,
    num_tokens,
    context,
    num_heads,
    num_kv_heads,
    head_dim,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and v -> grad [tokens, (heads + 2 kv_heads) head_dim], contiguous: each pair turned back.

    Of the first three the strides of batch, token and head are given; the last dimension is contiguous. amax [1]: the
    largest magnitude of grad, or None.
    """
    if amax_ptr is not None:
        so_far = amax_so_far(amax_ptr)
    half = head_dim // 2
    part, first, heads, column = _part(tl.program_id(0), num_tokens, num_heads, num_kv_heads, head_dim, ROWS)
    rows = first + tl.arange(0, ROWS)[:, None]
    tokens = rows // heads
    columns = tl.arange(0, HALF)[None, :]
    inside = (tokens < num_tokens) & (columns < half)
    batch, position, head = tokens // context, tokens % context, rows % heads
    from_ptr = _places(dq_ptr, batch, position, head, q_batch, q_token, q_head)
    if part == 1:
        from_ptr = _places(dk_ptr, batch, position, head, k_batch, k_token, k_head)
    if part == 2:
        from_ptr = _places(dv_ptr, batch, position, head, v_batch, v_token, v_head)
    from_ptr = from_ptr + columns
    a = tl.load(from_ptr, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(from_ptr + half, mask=inside, other=0.0).to(tl.float32)
    cosine, sine = _angles(table_ptr, sine_distance, tokens % context, half, columns, inside, part)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    to_ptr = grad_ptr + tokens.to(tl.int64) * width + column + (rows % heads) * head_dim + columns
    kind = grad_ptr.dtype.element_ty
    of_a, of_b = (a * cosine + b * sine).to(kind), (b * cosine - a * sine).to(kind)
    tl.store(to_ptr, of_a, mask=inside)
    tl.store(to_ptr + half, of_b, mask=inside)
    if amax_ptr is not None:
        raise_amax(amax_ptr, so_far, tl.maximum(magnitude_bits(of_a), magnitude_bits(of_b)))
