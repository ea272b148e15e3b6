"""Kernels for every device that Triton supports, including its interpreter on a CPU.

Forward is FlashAttention-2 (Dao 2023), algorithm 1: a program has one tile of queries of one head. Exponentials are
powers of two, with the scale and log2(e) in one factor. Tiles below the diagonal need no mask.

Backward is algorithm 2 in two sweeps: dK and dV by tiles of keys, then dQ by tiles of queries. S and dP are made twice,
seven products instead of five, so that no atomics are needed and every run gives the same bits. The kernels before and
after triton_hopper_backward.py's are here too.

Shape suffixes: M queries of a tile, N keys of a tile, D columns of the head dimension, filled up with zeros.
"""

import triton
import triton.language as tl


@triton.jit
def operand(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """x rounded for use as a factor: to `dtype`, or for TF32 to its 10 mantissa bits. The matrix units would truncate
    the other 13, which errs twice as much and always to the same side."""
    if PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # a NaN's bits may overflow
    return x.to(dtype)


@triton.jit
def plus_product(sums, a, b, PRECISION: tl.constexpr):
    """sums + a b, with a from `operand`. In IEEE float32 each tile's product is summed alone and then added, as cuBLAS
    adds parts: one running sum over thousands of terms errs several times as much. The compiler would fuse `sums +
    product` into a running sum, so -(-a b) is added. TF32's products err a thousand times more than either sum."""
    if PRECISION == "ieee" and a.dtype == tl.float32:
        return sums - tl.dot(-a, b, input_precision=PRECISION)
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def _attend(
    o_MD, largest_M, sum_M, q_MD, k_tiles, v_tiles, b, kv_head, first_query, first, end, num_keys, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    for first_key in tl.range(first, end, N):
        k_ND = k_tiles.load([b, kv_head, first_key, 0]).reshape(N, D)
        s_MN = tl.dot(q_MD, k_ND.T, input_precision=PRECISION)
        if MASKED:
            keys = first_key + tl.arange(0, N)[None, :]
            seen = keys < num_keys
            if CAUSAL:
                seen = seen & (keys <= first_query + tl.arange(0, M)[:, None])
            s_MN = tl.where(seen, s_MN, float("-inf"))
        new_largest_M = tl.maximum(largest_M, tl.max(s_MN * scale_log2, 1))
        # A row of -inf only: any finite number gives its exponentials as zeros.
        base_M = tl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)
        p_MN = tl.math.exp2(s_MN * scale_log2 - base_M[:, None])
        shrink_M = tl.math.exp2(largest_M - base_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        v_ND = v_tiles.load([b, kv_head, first_key, 0]).reshape(N, D)
        o_MD = plus_product(o_MD * shrink_M[:, None], operand(p_MN, v_ND.dtype, PRECISION), v_ND, PRECISION)
        largest_M = new_largest_M
    return o_MD, largest_M, sum_M


@triton.jit(do_not_specialize=["num_heads", "sharing", "num_queries", "num_keys"])
def attention_forward(
    q_tiles, k_tiles, v_tiles, o_tiles, lse_ptr, num_heads, sharing, num_queries, num_keys, scale_log2,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program for each tile of queries of each head; within a head, queries that see the most keys come first."""
    num_tiles = tl.cdiv(num_queries, M)
    first_query = (num_tiles - 1 - tl.program_id(0) % num_tiles) * M
    b_head = tl.program_id(0) // num_tiles
    b, head = b_head // num_heads, b_head % num_heads
    kv_head = head // sharing
    q_MD = q_tiles.load([b, head, first_query, 0]).reshape(M, D)
    o_MD = tl.zeros([M, D], tl.float32)
    largest_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    end = num_keys
    whole = num_keys // N * N  # keys in tiles that all queries see wholly
    if CAUSAL:
        end = tl.minimum(num_keys, first_query + M)
        whole = tl.minimum(whole, first_query // N * N)
    o_MD, largest_M, sum_M = _attend(
        o_MD, largest_M, sum_M, q_MD, k_tiles, v_tiles, b, kv_head, first_query, 0, whole, num_keys, scale_log2,
        False, CAUSAL, M, N, D, PRECISION,
    )  # fmt: skip
    o_MD, largest_M, sum_M = _attend(
        o_MD, largest_M, sum_M, q_MD, k_tiles, v_tiles, b, kv_head, first_query, whole, end, num_keys, scale_log2,
        True, CAUSAL, M, N, D, PRECISION,
    )  # fmt: skip
    o_MD = o_MD / tl.where(sum_M == 0, 1.0, sum_M)[:, None]
    o_tiles.store([b, head, first_query, 0], o_MD.to(o_tiles.dtype).reshape(1, 1, M, D))
    queries = first_query + tl.arange(0, M)
    lse_M = (largest_M + tl.math.log2(sum_M)) * 0.6931471805599453  # log 2
    tl.store(lse_ptr + b_head.to(tl.int64) * num_queries + queries, lse_M, mask=queries < num_queries)


# The head dimension is specialized for multiples of 16: else the compiler loads masked columns one by one.
@triton.jit(do_not_specialize=["num_heads", "num_queries", "num_padded", "num_turns"])
def attention_prepare(
    o_ptr, do_ptr, lse_ptr, minus_lse_ptr, minus_d_ptr, turns_ptr, o_b, o_h, o_s, do_b, do_h, do_s,
    num_heads, num_queries, num_padded, head_dim, num_turns, M: tl.constexpr, D: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Two numbers that backward adds, for each of M queries of a head: -lse in powers of two, and -D with D =
    rowsum(dO o O). Padding rows get -inf and 0, so that their weights are zero. So do queries that saw no key, whose
    lse is -inf. Each program also writes TURNS zeros: the turn counters of triton_hopper_backward.py."""
    num_tiles = num_padded // M
    b_head = (tl.program_id(0) // num_tiles).to(tl.int64)
    b, head = b_head // num_heads, b_head % num_heads
    queries = tl.program_id(0) % num_tiles * M + tl.arange(0, M)
    exist = queries < num_queries
    columns = tl.arange(0, D)[None, :]
    inside = exist[:, None] & (columns < head_dim)
    rows = queries.to(tl.int64)[:, None]
    o_MD = tl.load(o_ptr + b * o_b + head * o_h + rows * o_s + columns, mask=inside, other=0.0).to(tl.float32)
    do_MD = tl.load(do_ptr + b * do_b + head * do_h + rows * do_s + columns, mask=inside, other=0.0).to(tl.float32)
    lse_M = tl.load(lse_ptr + b_head * num_queries + queries, mask=exist, other=float("-inf"))
    rows_of_head = b_head * num_padded + queries
    tl.store(minus_lse_ptr + rows_of_head, tl.where(lse_M == float("-inf"), lse_M, -lse_M * 1.4426950408889634))
    tl.store(minus_d_ptr + rows_of_head, -tl.sum(o_MD * do_MD, 1))
    turns = tl.program_id(0) * TURNS + tl.arange(0, TURNS)
    tl.store(turns_ptr + turns, tl.zeros([TURNS], tl.int32), mask=turns < num_turns)


@triton.jit(do_not_specialize=["num_heads", "num_queries", "num_padded"])
def attention_finish(
    sums_ptr, dq_ptr, dq_b, dq_h, dq_s, num_heads, num_queries, num_padded, head_dim, scale,
    M: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """Scale and round the sums of dQ: a program has one part, WIDTH columns of M queries of a head. A part's sums are
    laid out as [WIDTH / PANEL, M, PANEL]."""
    num_tiles = num_padded // M
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    b_head = (tile // num_tiles).to(tl.int64)
    b, head = b_head // num_heads, b_head % num_heads
    rows = tl.arange(0, M)
    queries = tile % num_tiles * M + rows
    columns = tl.arange(0, WIDTH)[None, :]
    sums_ptr += tl.program_id(0).to(tl.int64) * (M * WIDTH)
    sums = tl.load(sums_ptr + (columns // PANEL * (M * PANEL) + rows[:, None] * PANEL + columns % PANEL))
    columns += part * WIDTH
    inside = (queries < num_queries)[:, None] & (columns < head_dim)
    dq_ptrs = dq_ptr + b * dq_b + head * dq_h + queries.to(tl.int64)[:, None] * dq_s + columns
    tl.store(dq_ptrs, (sums * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_over_queries(
    dk_ND, dv_ND, k_ND, v_ND, q_tiles, do_tiles, minus_lse_ptr, minus_d_ptr, b, head, first_key, first, end,
    num_queries, num_keys, scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first_query in tl.range(first, end, M):
        queries = first_query + tl.arange(0, M)
        q_MD = q_tiles.load([b, head, first_query, 0]).reshape(M, D)
        s_NM = tl.dot(k_ND, q_MD.T, input_precision=PRECISION)
        p_NM = tl.math.exp2(s_NM * scale_log2 + tl.load(minus_lse_ptr + queries)[None, :])
        if MASKED:
            keys = first_key + tl.arange(0, N)[:, None]
            seen = (keys < num_keys) & (queries[None, :] < num_queries)
            if CAUSAL:
                seen = seen & (keys <= queries[None, :])
            p_NM = tl.where(seen, p_NM, 0.0)
        do_MD = do_tiles.load([b, head, first_query, 0]).reshape(M, D)
        dp_NM = tl.dot(v_ND, do_MD.T, input_precision=PRECISION) + tl.load(minus_d_ptr + queries)[None, :]
        dv_ND = plus_product(dv_ND, operand(p_NM, do_MD.dtype, PRECISION), do_MD, PRECISION)
        ds_NM = operand(p_NM * dp_NM, q_MD.dtype, PRECISION)
        dk_ND = plus_product(dk_ND, ds_NM, q_MD, PRECISION)
    return dk_ND, dv_ND


@triton.jit(do_not_specialize=["num_heads", "sharing", "num_queries", "num_keys", "num_padded"])
def attention_backward_kv(
    q_tiles, k_tiles, v_tiles, do_tiles, dk_tiles, dv_tiles, minus_lse_ptr, minus_d_ptr,
    num_heads, sharing, num_queries, num_keys, num_padded, scale, scale_log2,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, from all heads that share them."""
    num_tiles = tl.cdiv(num_keys, N)
    first_key = tl.program_id(0) % num_tiles * N
    num_kv_heads = num_heads // sharing
    b = tl.program_id(0) // num_tiles // num_kv_heads
    kv_head = tl.program_id(0) // num_tiles % num_kv_heads
    k_ND = k_tiles.load([b, kv_head, first_key, 0]).reshape(N, D)
    v_ND = v_tiles.load([b, kv_head, first_key, 0]).reshape(N, D)
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)
    first = 0
    masked_end = 0
    if first_key + N > num_keys:
        masked_end = num_queries
    if CAUSAL:
        first = first_key // M * M
        masked_end = tl.maximum(masked_end, tl.minimum(num_queries, tl.cdiv(first_key + N - 1, M) * M))
    start = tl.maximum(first, masked_end)
    # Padding has weights of zero, but keys of -inf times its zeros are NaN.
    whole = tl.maximum(start, num_queries // M * M)
    for head in range(kv_head * sharing, (kv_head + 1) * sharing):
        row = (b * num_heads + head).to(tl.int64) * num_padded
        dk_ND, dv_ND = _sum_over_queries(
            dk_ND, dv_ND, k_ND, v_ND, q_tiles, do_tiles, minus_lse_ptr + row, minus_d_ptr + row, b, head, first_key,
            first, masked_end, num_queries, num_keys, scale_log2, True, CAUSAL, M, N, D, PRECISION,
        )  # fmt: skip
        dk_ND, dv_ND = _sum_over_queries(
            dk_ND, dv_ND, k_ND, v_ND, q_tiles, do_tiles, minus_lse_ptr + row, minus_d_ptr + row, b, head, first_key,
            start, whole, num_queries, num_keys, scale_log2, False, CAUSAL, M, N, D, PRECISION,
        )  # fmt: skip
        dk_ND, dv_ND = _sum_over_queries(
            dk_ND, dv_ND, k_ND, v_ND, q_tiles, do_tiles, minus_lse_ptr + row, minus_d_ptr + row, b, head, first_key,
            whole, num_queries, num_queries, num_keys, scale_log2, True, CAUSAL, M, N, D, PRECISION,
        )  # fmt: skip
    dk_tiles.store([b, kv_head, first_key, 0], (dk_ND * scale).to(dk_tiles.dtype).reshape(1, 1, N, D))
    dv_tiles.store([b, kv_head, first_key, 0], dv_ND.to(dv_tiles.dtype).reshape(1, 1, N, D))


@triton.jit
def _sum_over_keys(
    dq_MD, q_MD, do_MD, k_tiles, v_tiles, minus_lse_M, minus_d_M, b, kv_head, first_query, first, end, num_keys,
    scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    for first_key in tl.range(first, end, N):
        k_ND = k_tiles.load([b, kv_head, first_key, 0]).reshape(N, D)
        s_MN = tl.dot(q_MD, k_ND.T, input_precision=PRECISION)
        p_MN = tl.math.exp2(s_MN * scale_log2 + minus_lse_M[:, None])
        v_ND = v_tiles.load([b, kv_head, first_key, 0]).reshape(N, D)
        ds_MN = p_MN * (tl.dot(do_MD, v_ND.T, input_precision=PRECISION) + minus_d_M[:, None])
        if MASKED:
            keys = first_key + tl.arange(0, N)[None, :]
            seen = keys < num_keys
            if CAUSAL:
                seen = seen & (keys <= first_query + tl.arange(0, M)[:, None])
            ds_MN = tl.where(seen, ds_MN, 0.0)
        dq_MD = plus_product(dq_MD, operand(ds_MN, k_ND.dtype, PRECISION), k_ND, PRECISION)
    return dq_MD


@triton.jit(do_not_specialize=["num_heads", "sharing", "num_queries", "num_keys", "num_padded"])
def attention_backward_q(
    q_tiles, k_tiles, v_tiles, do_tiles, dq_tiles, minus_lse_ptr, minus_d_ptr,
    num_heads, sharing, num_queries, num_keys, num_padded, scale, scale_log2,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries; within a head, queries that see the most keys come first."""
    num_tiles = tl.cdiv(num_queries, M)
    first_query = (num_tiles - 1 - tl.program_id(0) % num_tiles) * M
    b_head = tl.program_id(0) // num_tiles
    b, head = b_head // num_heads, b_head % num_heads
    q_MD = q_tiles.load([b, head, first_query, 0]).reshape(M, D)
    do_MD = do_tiles.load([b, head, first_query, 0]).reshape(M, D)
    queries = b_head.to(tl.int64) * num_padded + first_query + tl.arange(0, M)
    minus_lse_M = tl.load(minus_lse_ptr + queries)
    minus_d_M = tl.load(minus_d_ptr + queries)
    dq_MD = tl.zeros([M, D], tl.float32)
    end = num_keys
    whole = num_keys // N * N
    if CAUSAL:
        end = tl.minimum(num_keys, first_query + M)
        whole = tl.minimum(whole, first_query // N * N)
    dq_MD = _sum_over_keys(
        dq_MD, q_MD, do_MD, k_tiles, v_tiles, minus_lse_M, minus_d_M, b, head // sharing, first_query, 0, whole,
        num_keys, scale_log2, False, CAUSAL, M, N, D, PRECISION,
    )  # fmt: skip
    dq_MD = _sum_over_keys(
        dq_MD, q_MD, do_MD, k_tiles, v_tiles, minus_lse_M, minus_d_M, b, head // sharing, first_query, whole, end,
        num_keys, scale_log2, True, CAUSAL, M, N, D, PRECISION,
    )  # fmt: skip
    dq_tiles.store([b, head, first_query, 0], (dq_MD * scale).to(dq_tiles.dtype).reshape(1, 1, M, D))
