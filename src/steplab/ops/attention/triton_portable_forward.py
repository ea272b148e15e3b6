"""The forward kernel that runs wherever Triton does, its interpreter on a CPU included.

FlashAttention-2 (Dao 2023), algorithm 1: a program has one tile of queries of one head, goes over the tiles of keys
that the tile sees, and keeps of the scores of each row their largest and the sum of their exponentials. Exponentials
are powers of two, with the scale and log2(e) in one factor. Tiles below the diagonal need no mask and have a loop of
their own; tiles above it are not visited.

Shape suffixes: M queries of a tile, N keys of a tile, D columns of the head dimension, filled up with zeros.
"""

import triton
import triton.language as tl

from .triton_portable_tiles import operand, plus_product


@triton.jit
def _attend(
    o_MD, largest_M, sum_M, q_MD, k_tiles, v_tiles, b, kv_head, first_query, first, end, num_keys, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys from `first` to `end`, a tile at a time."""
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
        # A row that has seen nothing but -inf: any finite number gives its exponentials as the zeros that they are.
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
    """One program a tile of queries and a head; the longest rows of a head first."""
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
    whole = num_keys // N * N  # keys in tiles of which all queries see all
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
