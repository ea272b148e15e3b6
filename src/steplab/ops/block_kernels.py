"""Kernels between the products of a block: RMSNorm, rotary embedding and SwiGLU."""

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """|x| as the bits of a float32, in an int32. Compared as integers they have the order of |x|, with NaN on top.

    x has a format of at most 32 bits."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_so_far(amax_ptr):
    """Bits of amax [1], a float32 that is 0 before the kernel. The load skips the L1 cache, whose copy may be old."""
    return tl.load(amax_ptr.to(tl.pointer_type(tl.int32)), cache_modifier=".cg")


@triton.jit
def raise_amax(amax_ptr, so_far, bits):
    top = tl.max(bits)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), top, mask=top > so_far, sem="relaxed")


@triton.jit
def add_rms_norm_kernel(
    x_ptr, branch_ptr, weight_ptr, normed_ptr, sum_ptr, rstd_ptr, amax_ptr, width, eps, BLOCK: tl.constexpr
):
    """sum = x + branch, rstd = 1 / sqrt(mean(sum^2) + eps), normed = sum rstd weight, for rows of `width` elements.
    amax [1]: the largest magnitude of normed, or None."""
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
    """With n = sum rstd, h = grad weight: grad_x = rstd (h - n mean(h n)) + grad_sum. grad_branch is the same, in the
    branch's format.

    grad is the gradient of normed, grad_sum of the sum. Each program takes every num_programs-th row, and writes its
    sum of grad n over these rows to shares [programs, width], float32.
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


@triton.jit
def _part(program, num_tokens, num_heads, num_kv_heads, head_dim, ROWS: tl.constexpr):
    """A program's part (0 queries, 1 keys, 2 values), its first row there, number of heads, and first column in the
    merged projection."""
    of_queries = tl.cdiv(num_tokens * num_heads, ROWS)
    of_keys = tl.cdiv(num_tokens * num_kv_heads, ROWS)
    part = tl.where(program < of_queries, 0, tl.where(program < of_queries + of_keys, 1, 2))
    first = tl.where(part == 0, 0, tl.where(part == 1, of_queries, of_queries + of_keys))
    heads = tl.where(part == 0, num_heads, num_kv_heads)
    column = tl.where(part == 0, 0, tl.where(part == 1, num_heads, num_heads + num_kv_heads)) * head_dim
    return part, (program - first) * ROWS, heads, column


@triton.jit
def _angles(table_ptr, sine_distance, position, half, columns, inside, part):
    """Cosines and sines of the rows' positions. Values are not rotated: their cosines are 1 and their sines 0.

    `columns`, not the scalar `part`, is compared for the mask. The interpreter of Triton 3.9 widens a scalar's
    comparison to int32, which is no mask.
    """
    places = position * half + columns
    turning = inside & (columns < tl.where(part < 2, half, 0))
    cosine = tl.load(table_ptr + places, mask=turning, other=1.0)
    sine = tl.load(table_ptr + sine_distance + places, mask=turning, other=0.0)
    return cosine, sine


@triton.jit
def _places(base_ptr, batch, position, head, of_batch, of_token, of_head):
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
    """merged [tokens, (heads + 2 kv_heads) head_dim] -> q, k, v [tokens, heads, head_dim], all contiguous. table [2,
    positions, head_dim / 2] of cosines and sines, float32, with sines sine_distance further on; a token's position is
    its number modulo context."""
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
    """Gradients of q, k and v -> grad [tokens, (heads + 2 kv_heads) head_dim], contiguous: each pair rotated back. The
    first three come with the strides of batch, token and head; the last dimension is contiguous. amax [1]: the largest
    magnitude of grad, or None."""
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


@triton.jit
def swiglu_kernel(joined_ptr, out_ptr, amax_ptr, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """joined [rows, gate|up] -> out [rows, width], contiguous; amax [1], zeroed: out's largest magnitude, or None."""
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
    """The gradient of joined [rows, 2 width] for grad [rows, width], all contiguous; see plain_swiglu. amax [1]: the
    largest magnitude of that gradient, or None."""
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
