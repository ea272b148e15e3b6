"""The forward kernel for Hopper GPUs in bf16 and fp16. See triton_hopper_tiles.py for how the work is divided.

A program has 128 queries of one head. Tiles of keys come from the last that they see to the first, so that the masked
ones are done with first.

Shape suffixes: R rows (queries) of a consumer, N keys of a tile, D columns of the head dimension.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from steplab.ops.attention.triton_hopper_tiles import (
    NUM_CONSUMERS,
    ROWS,
    barrier,
    own_tiles,
    put,
    ring,
    times,
    times_transposed,
)


@gluon.jit
def _load(q_tiles, k_tiles, v_tiles, b, head, kv_head, first_query, num_tiles, q_own, q_arrived, k_ring, v_ring,
          N: gl.constexpr):  # fmt: skip
    mbarrier.expect(q_arrived, NUM_CONSUMERS * q_tiles.block_type.nbytes)
    for c in gl.static_range(NUM_CONSUMERS):
        tma.async_copy_global_to_shared(q_tiles, [b, head, first_query + c * ROWS, 0], q_arrived, q_own.index(c))
    for i in range(num_tiles):
        first_key = (num_tiles - 1 - i) * N
        k_arrived = k_ring.room(i, k_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(k_tiles, [b, kv_head, first_key, 0], k_arrived, k_ring.slot(i))
        v_arrived = v_ring.room(i, v_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(v_tiles, [b, kv_head, first_key, 0], v_arrived, v_ring.slot(i))


@gluon.jit
def _softmax(s_RN, largest_R, sum_R, scale_log2, first_query, first_key, num_keys,
             MASKED: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr):  # fmt: skip
    """Exponentials of one more tile of scores, and by how much what was summed before shrinks."""
    if MASKED:
        keys = first_key + gl.arange(0, N, gl.SliceLayout(0, s_RN.type.layout))[None, :]
        seen = keys < num_keys
        if CAUSAL:
            queries = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, s_RN.type.layout))
            seen = seen & (keys <= queries[:, None])
        s_RN = gl.where(seen, s_RN, float("-inf"))
    new_largest_R = gl.maximum(largest_R, gl.max(s_RN, 1))
    # A row that has seen nothing but -inf: any finite number gives its exponentials as the zeros that they are.
    base_R = gl.where(new_largest_R == float("-inf"), 0.0, new_largest_R) * scale_log2
    p_RN = gl.exp2(s_RN * scale_log2 - base_R[:, None])
    shrink_R = gl.exp2(largest_R * scale_log2 - base_R)
    return p_RN, new_largest_R, sum_R * shrink_R + gl.sum(p_RN, 1), shrink_R


@gluon.jit
def _round(i, o_RD, rest_RD, p_RN, largest_R, sum_R, q_RD, k_ring, v_ring, scale_log2, first_query, first_key, num_keys,
           MASKED: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, MAIN: gl.constexpr,
           REST: gl.constexpr):  # fmt: skip
    """The scores of tile i, and under their exponentials the output of tile i - 1."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    NUM_STARTED: gl.constexpr = 1 if REST == 0 else 2
    s_RN = times_transposed(q_RD, k_ring.take(i), gl.zeros([ROWS, N], gl.float32, S), MAIN, REST)
    o_RD, rest_RD = times(p_RN, v_ring.take(i - 1), o_RD, rest_RD, MAIN, REST)
    s_RN = warpgroup_mma_wait(NUM_STARTED, [s_RN])
    k_ring.release(i)
    e_RN, largest_R, sum_R, shrink_R = _softmax(
        s_RN, largest_R, sum_R, scale_log2, first_query, first_key, num_keys, MASKED, CAUSAL, N
    )
    if REST > 0:
        o_RD, rest_RD, p_RN = warpgroup_mma_wait(0, [o_RD, rest_RD, p_RN])
        rest_RD = rest_RD * gl.convert_layout(shrink_R, gl.SliceLayout(1, rest_RD.type.layout))[:, None]
    else:
        o_RD, p_RN = warpgroup_mma_wait(0, [o_RD, p_RN])
    v_ring.release(i - 1)
    o_RD = o_RD * gl.convert_layout(shrink_R, gl.SliceLayout(1, O))[:, None]
    p_RN = gl.convert_layout(e_RN.to(q_RD.dtype), gl.DotOperandLayout(0, O, 2))
    return o_RD, rest_RD, p_RN, largest_R, sum_R


@gluon.jit
def _attend(o_tiles, lse_ptr, b, head, b_head, first_query, num_tiles, num_queries, num_keys, scale_log2,
            q_own, q_arrived, k_ring, v_ring, CONSUMER: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr,
            MAIN: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    SOME: gl.constexpr = REST if REST > 0 else 16
    REST_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SOME, 16])
    first_query += CONSUMER * ROWS
    q_RD = q_own.index(CONSUMER)
    largest_R = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    sum_R = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    o_RD = gl.zeros([ROWS, MAIN], gl.float32, O)
    rest_RD = gl.zeros([ROWS, SOME], gl.float32, REST_O)
    mbarrier.wait(q_arrived, 0)
    s_RN = times_transposed(q_RD, k_ring.take(0), gl.zeros([ROWS, N], gl.float32, S), MAIN, REST)
    s_RN = warpgroup_mma_wait(0, [s_RN])
    k_ring.release(0)
    e_RN, largest_R, sum_R, shrink_R = _softmax(
        s_RN, largest_R, sum_R, scale_log2, first_query, (num_tiles - 1) * N, num_keys, True, CAUSAL, N
    )
    p_RN = gl.convert_layout(e_RN.to(q_RD.dtype), gl.DotOperandLayout(0, O, 2))
    num_masked = 1
    if CAUSAL:
        num_masked = gl.minimum(num_tiles, gl.cdiv(NUM_CONSUMERS * ROWS, N) + 1)
    for i in range(1, num_masked):
        o_RD, rest_RD, p_RN, largest_R, sum_R = _round(
            i, o_RD, rest_RD, p_RN, largest_R, sum_R, q_RD, k_ring, v_ring, scale_log2, first_query,
            (num_tiles - 1 - i) * N, num_keys, True, CAUSAL, N, MAIN, REST,
        )  # fmt: skip
    for i in range(num_masked, num_tiles):
        o_RD, rest_RD, p_RN, largest_R, sum_R = _round(
            i, o_RD, rest_RD, p_RN, largest_R, sum_R, q_RD, k_ring, v_ring, scale_log2, first_query,
            (num_tiles - 1 - i) * N, num_keys, False, CAUSAL, N, MAIN, REST,
        )  # fmt: skip
    o_RD, rest_RD = times(p_RN, v_ring.take(num_tiles - 1), o_RD, rest_RD, MAIN, REST)
    part_R = 1 / gl.where(sum_R == 0, 1.0, sum_R)
    if REST > 0:
        rest_RD = warpgroup_mma_wait(0, [rest_RD])
        rest_RD = rest_RD * gl.convert_layout(part_R, gl.SliceLayout(1, REST_O))[:, None]
    o_RD, p_RN = warpgroup_mma_wait(0, [o_RD, p_RN])
    o_RD = o_RD * gl.convert_layout(part_R, gl.SliceLayout(1, O))[:, None]
    put(q_RD, o_RD, rest_RD, MAIN, REST)  # the consumer's queries are done with
    tma.async_copy_shared_to_global(o_tiles, [b, head, first_query, 0], q_RD)
    queries = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    lse_R = (largest_R * scale_log2 + gl.log2(sum_R)) * 0.6931471805599453  # log 2
    gl.store(lse_ptr + b_head.to(gl.int64) * num_queries + queries, lse_R, mask=queries < num_queries)
    tma.store_wait(0)


@gluon.jit
def forward_kernel(q_tiles, k_tiles, v_tiles, o_tiles, lse_ptr, num_heads, sharing, num_queries, num_keys, scale_log2,
                   CAUSAL: gl.constexpr, N: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, BOX: gl.constexpr,
                   NUM_SLOTS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                   LOADER_REGISTERS: gl.constexpr):  # fmt: skip
    """One program 128 queries of a head; the longest rows of a head first."""
    M: gl.constexpr = NUM_CONSUMERS * ROWS
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    num_rows = gl.cdiv(num_queries, M)
    first_query = (num_rows - 1 - gl.program_id(0) % num_rows) * M
    b_head = gl.program_id(0) // num_rows
    b, head = b_head // num_heads, b_head % num_heads
    kv_head = head // sharing
    end = num_keys
    if CAUSAL:
        end = gl.minimum(num_keys, first_query + M)
    num_tiles = gl.cdiv(end, N)
    q_own = own_tiles(q_tiles.dtype, BOX)
    q_arrived = barrier()
    k_ring = ring(k_tiles.dtype, N, BOX, NUM_SLOTS)
    v_ring = ring(k_tiles.dtype, N, BOX, NUM_SLOTS)
    fence_async_shared()
    gl.warp_specialize([
        (_attend, (o_tiles, lse_ptr, b, head, b_head, first_query, num_tiles, num_queries, num_keys, scale_log2,
                   q_own, q_arrived, k_ring, v_ring, FIRST, CAUSAL, N, MAIN, REST)),
        (_attend, (o_tiles, lse_ptr, b, head, b_head, first_query, num_tiles, num_queries, num_keys, scale_log2,
                   q_own, q_arrived, k_ring, v_ring, SECOND, CAUSAL, N, MAIN, REST)),
        (_load, (q_tiles, k_tiles, v_tiles, b, head, kv_head, first_query, num_tiles, q_own, q_arrived, k_ring,
                 v_ring, N)),
    ], [4, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
