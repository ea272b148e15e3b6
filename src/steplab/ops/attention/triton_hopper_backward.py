"""The backward kernels for Hopper GPUs in bf16 and fp16: the two sweeps of triton_portable_backward.py, divided among
warps as triton_hopper_tiles.py says.

Note "starting sums": the number that is to be subtracted from a sum of products, lse or D of the query, is where the
sum starts, -lse / scale and -D, instead of zero. That saves an operation an element, and the registers that would hold
a number for every column of a tile. In float32 it would cost accuracy: each step of the sum is rounded as a number of
the size of its start. Sums of bf16 and fp16 products have digits to spare.

Shape suffixes: R rows of a consumer (keys in the first sweep, queries in the second), M queries of a tile, N keys of a
tile, D columns of the head dimension.
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
def _numbers(M: gl.constexpr, num_slots: gl.constexpr):
    """Room for a number a query of each tile in a ring."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return gl.allocate_shared_memory(gl.float32, [num_slots, M], layout)


# --- first sweep: dK and dV ----------------------------------------------------------------------------------------


@gluon.jit
def _load_for_keys(q_tiles, k_tiles, v_tiles, do_tiles, start_s_tiles, minus_d_tiles, b, kv_head, num_heads, sharing,
                   first_key, first_query, num_tiles, num_padded, k_own, v_own, kv_arrived, q_ring, do_ring, start_s,
                   minus_d, M: gl.constexpr):  # fmt: skip
    mbarrier.expect(kv_arrived, NUM_CONSUMERS * (k_tiles.block_type.nbytes + v_tiles.block_type.nbytes))
    for c in gl.static_range(NUM_CONSUMERS):
        tma.async_copy_global_to_shared(k_tiles, [b, kv_head, first_key + c * ROWS, 0], kv_arrived, k_own.index(c))
        tma.async_copy_global_to_shared(v_tiles, [b, kv_head, first_key + c * ROWS, 0], kv_arrived, v_own.index(c))
    for i in range(sharing * num_tiles):
        head = kv_head * sharing + i // num_tiles
        query = first_query + i % num_tiles * M
        number = (b * num_heads + head) * num_padded + query
        arrived = q_ring.room(i, q_tiles.block_type.nbytes + start_s_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(q_tiles, [b, head, query, 0], arrived, q_ring.slot(i))
        tma.async_copy_global_to_shared(start_s_tiles, [number], arrived, start_s.index(i % q_ring.num_slots))
        arrived = do_ring.room(i, do_tiles.block_type.nbytes + minus_d_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(do_tiles, [b, head, query, 0], arrived, do_ring.slot(i))
        tma.async_copy_global_to_shared(minus_d_tiles, [number], arrived, minus_d.index(i % do_ring.num_slots))


@gluon.jit
def _round_of_keys(i, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, ds_RM, k_RD, v_RD, q_ring, do_ring, start_s, minus_d,
                   scale_log2, first_key, first_query, num_queries, num_keys, MASKED: gl.constexpr,
                   CAUSAL: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """What the consumer's keys get from the i-th tile of queries; of dK, what they get from the tile before."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dk_RD.type.layout, 2)
    NUM_STARTED: gl.constexpr = 1 if REST == 0 else 2
    zero = gl.zeros([ROWS, M], gl.float32, S)
    q_MD = q_ring.take(i)
    start_M = start_s.index(i % q_ring.num_slots).load(gl.SliceLayout(0, S))
    s_RM = times_transposed(k_RD, q_MD, start_M[None, :] + zero, MAIN, REST)
    do_MD = do_ring.take(i)
    start_M = minus_d.index(i % do_ring.num_slots).load(gl.SliceLayout(0, S))
    dp_RM = times_transposed(v_RD, do_MD, start_M[None, :] + zero, MAIN, REST)
    # Before the first tile there is none: ds is zero then, and any queries will do, so its own.
    before = gl.maximum(i - 1, 0)
    dk_RD, dk_rest_RD = times(ds_RM, q_ring.slot(before), dk_RD, dk_rest_RD, MAIN, REST)
    s_RM = warpgroup_mma_wait(2 * NUM_STARTED, [s_RM])
    p_RM = gl.exp2(s_RM * scale_log2)
    if MASKED:
        keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, S))[:, None]
        queries = (first_query + gl.arange(0, M, gl.SliceLayout(0, S)))[None, :]
        # Queries beyond the last are zeros, which a key of infinities makes NaN of.
        seen = (keys < num_keys) & (queries < num_queries)
        if CAUSAL:
            seen = seen & (keys <= queries)
        p_RM = gl.where(seen, p_RM, 0.0)
    weights_RM = gl.convert_layout(p_RM.to(q_MD.dtype), P)
    dp_RM = warpgroup_mma_wait(NUM_STARTED, [dp_RM])
    dv_RD, dv_rest_RD = times(weights_RM, do_MD, dv_RD, dv_rest_RD, MAIN, REST)
    new_RM = gl.convert_layout((p_RM * dp_RM).to(q_MD.dtype), P)
    if REST > 0:
        dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, ds_RM, weights_RM = warpgroup_mma_wait(
            0, [dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, ds_RM, weights_RM]
        )
    else:
        dk_RD, dv_RD, ds_RM, weights_RM = warpgroup_mma_wait(0, [dk_RD, dv_RD, ds_RM, weights_RM])
    q_ring.release(before, pred=i > 0)
    do_ring.release(i)
    return dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, new_RM


@gluon.jit
def _sum_over_queries(dk_tiles, dv_tiles, b, kv_head, sharing, first_key, first_query, num_tiles, num_masked, num_whole,
                      num_queries, num_keys, scale, scale_log2, k_own, v_own, kv_arrived, q_ring, do_ring, start_s,
                      minus_d, CONSUMER: gl.constexpr, CAUSAL: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr,
                      REST: gl.constexpr):  # fmt: skip
    G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    SOME: gl.constexpr = REST if REST > 0 else 16
    REST_G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SOME, 16])
    first_key += CONSUMER * ROWS
    k_RD = k_own.index(CONSUMER)
    v_RD = v_own.index(CONSUMER)
    dk_RD = gl.zeros([ROWS, MAIN], gl.float32, G)
    dv_RD = gl.zeros([ROWS, MAIN], gl.float32, G)
    dk_rest_RD = gl.zeros([ROWS, SOME], gl.float32, REST_G)
    dv_rest_RD = gl.zeros([ROWS, SOME], gl.float32, REST_G)
    ds_RM = gl.zeros([ROWS, M], k_RD.dtype, gl.DotOperandLayout(0, G, 2))
    mbarrier.wait(kv_arrived, 0)
    for h in range(sharing):
        for t in range(num_masked):
            dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, ds_RM = _round_of_keys(
                h * num_tiles + t, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, ds_RM, k_RD, v_RD, q_ring, do_ring, start_s,
                minus_d, scale_log2, first_key, first_query + t * M, num_queries, num_keys, True, CAUSAL, M, MAIN,
                REST,
            )  # fmt: skip
        for t in range(num_masked, num_whole):
            dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, ds_RM = _round_of_keys(
                h * num_tiles + t, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, ds_RM, k_RD, v_RD, q_ring, do_ring, start_s,
                minus_d, scale_log2, first_key, first_query + t * M, num_queries, num_keys, False, CAUSAL, M, MAIN,
                REST,
            )  # fmt: skip
        for t in range(gl.maximum(num_masked, num_whole), num_tiles):
            dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, ds_RM = _round_of_keys(
                h * num_tiles + t, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, ds_RM, k_RD, v_RD, q_ring, do_ring, start_s,
                minus_d, scale_log2, first_key, first_query + t * M, num_queries, num_keys, True, CAUSAL, M, MAIN,
                REST,
            )  # fmt: skip
    if num_tiles > 0:
        last_MD = q_ring.slot(sharing * num_tiles - 1)
        dk_RD, dk_rest_RD = times(ds_RM, last_MD, dk_RD, dk_rest_RD, MAIN, REST)
        if REST > 0:
            dk_rest_RD = warpgroup_mma_wait(0, [dk_rest_RD])
        dk_RD, ds_RM = warpgroup_mma_wait(0, [dk_RD, ds_RM])
    put(k_RD, dk_RD * scale, dk_rest_RD * scale, MAIN, REST)  # the consumer's keys and values are done with
    put(v_RD, dv_RD, dv_rest_RD, MAIN, REST)
    tma.async_copy_shared_to_global(dk_tiles, [b, kv_head, first_key, 0], k_RD)
    tma.async_copy_shared_to_global(dv_tiles, [b, kv_head, first_key, 0], v_RD)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_heads", "sharing", "num_queries", "num_keys", "num_padded"])
def backward_kv_kernel(q_tiles, k_tiles, v_tiles, do_tiles, dk_tiles, dv_tiles, start_s_tiles, minus_d_tiles,
                       num_heads, sharing, num_queries, num_keys, num_padded, scale, scale_log2,
                       CAUSAL: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
                       BOX: gl.constexpr, NUM_SLOTS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                       LOADER_REGISTERS: gl.constexpr):  # fmt: skip
    """dK and dV of 128 keys, from all heads that share them."""
    N: gl.constexpr = NUM_CONSUMERS * ROWS
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    ENOUGH: gl.constexpr = 2
    num_columns = gl.cdiv(num_keys, N)
    first_key = gl.program_id(0) % num_columns * N
    num_kv_heads = num_heads // sharing
    b = gl.program_id(0) // num_columns // num_kv_heads
    kv_head = gl.program_id(0) // num_columns % num_kv_heads
    first_query = 0
    num_tiles = gl.cdiv(num_queries, M)
    num_whole = num_queries // M
    num_masked = 0
    if CAUSAL:
        first_query = first_key // M * M
        num_tiles = gl.maximum(num_tiles - first_key // M, 0)
        num_whole = gl.maximum(num_whole - first_key // M, 0)
        num_masked = gl.minimum(num_tiles, gl.cdiv(first_key + N - 1 - first_query, M))
    if first_key + N > num_keys:
        num_masked = num_tiles
    k_own = own_tiles(k_tiles.dtype, BOX)
    v_own = own_tiles(k_tiles.dtype, BOX)
    kv_arrived = barrier()
    q_ring = ring(k_tiles.dtype, M, BOX, NUM_SLOTS)
    do_ring = ring(k_tiles.dtype, M, BOX, ENOUGH)
    start_s = _numbers(M, NUM_SLOTS)
    minus_d = _numbers(M, ENOUGH)
    fence_async_shared()
    gl.warp_specialize([
        (_sum_over_queries, (dk_tiles, dv_tiles, b, kv_head, sharing, first_key, first_query, num_tiles, num_masked,
                             num_whole, num_queries, num_keys, scale, scale_log2, k_own, v_own, kv_arrived, q_ring,
                             do_ring, start_s, minus_d, FIRST, CAUSAL, M, MAIN, REST)),
        (_sum_over_queries, (dk_tiles, dv_tiles, b, kv_head, sharing, first_key, first_query, num_tiles, num_masked,
                             num_whole, num_queries, num_keys, scale, scale_log2, k_own, v_own, kv_arrived, q_ring,
                             do_ring, start_s, minus_d, SECOND, CAUSAL, M, MAIN, REST)),
        (_load_for_keys, (q_tiles, k_tiles, v_tiles, do_tiles, start_s_tiles, minus_d_tiles, b, kv_head, num_heads,
                          sharing, first_key, first_query, num_tiles, num_padded, k_own, v_own, kv_arrived, q_ring,
                          do_ring, start_s, minus_d, M)),
    ], [4, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS])  # fmt: skip


# --- second sweep: dQ ----------------------------------------------------------------------------------------------


@gluon.jit
def _load_for_queries(q_tiles, k_tiles, v_tiles, do_tiles, b, head, kv_head, first_query, num_tiles, q_own, do_own,
                      q_arrived, k_ring, v_ring, N: gl.constexpr):  # fmt: skip
    mbarrier.expect(q_arrived, NUM_CONSUMERS * (q_tiles.block_type.nbytes + do_tiles.block_type.nbytes))
    for c in gl.static_range(NUM_CONSUMERS):
        tma.async_copy_global_to_shared(q_tiles, [b, head, first_query + c * ROWS, 0], q_arrived, q_own.index(c))
        tma.async_copy_global_to_shared(do_tiles, [b, head, first_query + c * ROWS, 0], q_arrived, do_own.index(c))
    for i in range(num_tiles):
        first_key = (num_tiles - 1 - i) * N
        k_arrived = k_ring.room(i, k_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(k_tiles, [b, kv_head, first_key, 0], k_arrived, k_ring.slot(i))
        v_arrived = v_ring.room(i, v_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(v_tiles, [b, kv_head, first_key, 0], v_arrived, v_ring.slot(i))


@gluon.jit
def _round_of_queries(i, dq_RD, rest_RD, ds_RN, q_RD, do_RD, start_s_R, minus_d_R, k_ring, v_ring, scale_log2,
                      first_query, first_key, num_keys, MASKED: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr,
                      MAIN: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """dS of the i-th tile of keys, and what the consumer's queries get from the tile before."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, dq_RD.type.layout, 2)
    NUM_STARTED: gl.constexpr = 1 if REST == 0 else 2
    zero = gl.zeros([ROWS, N], gl.float32, S)
    k_ND = k_ring.take(i)
    s_RN = times_transposed(q_RD, k_ND, start_s_R[:, None] + zero, MAIN, REST)
    dp_RN = times_transposed(do_RD, v_ring.take(i), minus_d_R[:, None] + zero, MAIN, REST)
    # Before the first tile there is none: ds is zero then, and any keys will do, so its own.
    before = gl.maximum(i - 1, 0)
    dq_RD, rest_RD = times(ds_RN, k_ring.slot(before), dq_RD, rest_RD, MAIN, REST)
    s_RN = warpgroup_mma_wait(2 * NUM_STARTED, [s_RN])
    p_RN = gl.exp2(s_RN * scale_log2)
    dp_RN = warpgroup_mma_wait(NUM_STARTED, [dp_RN])
    v_ring.release(i)
    new_RN = p_RN * dp_RN
    if MASKED:
        keys = first_key + gl.arange(0, N, gl.SliceLayout(0, S))[None, :]
        seen = keys < num_keys
        if CAUSAL:
            seen = seen & (keys <= (first_query + gl.arange(0, ROWS, gl.SliceLayout(1, S)))[:, None])
        new_RN = gl.where(seen, new_RN, 0.0)
    new_RN = gl.convert_layout(new_RN.to(k_ND.dtype), P)
    if REST > 0:
        dq_RD, rest_RD, ds_RN = warpgroup_mma_wait(0, [dq_RD, rest_RD, ds_RN])
    else:
        dq_RD, ds_RN = warpgroup_mma_wait(0, [dq_RD, ds_RN])
    k_ring.release(before, pred=i > 0)
    return dq_RD, rest_RD, new_RN


@gluon.jit
def _sum_over_keys(dq_tiles, start_s_ptr, minus_d_ptr, b, head, b_head, first_query, num_tiles, num_masked, num_keys,
                   num_padded, scale, scale_log2, q_own, do_own, q_arrived, k_ring, v_ring,
                   CONSUMER: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, MAIN: gl.constexpr,
                   REST: gl.constexpr):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    SOME: gl.constexpr = REST if REST > 0 else 16
    REST_G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SOME, 16])
    first_query += CONSUMER * ROWS
    q_RD = q_own.index(CONSUMER)
    do_RD = do_own.index(CONSUMER)
    queries = b_head.to(gl.int64) * num_padded + first_query + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    start_s_R = gl.load(start_s_ptr + queries)
    minus_d_R = gl.load(minus_d_ptr + queries)
    dq_RD = gl.zeros([ROWS, MAIN], gl.float32, G)
    rest_RD = gl.zeros([ROWS, SOME], gl.float32, REST_G)
    ds_RN = gl.zeros([ROWS, N], q_RD.dtype, gl.DotOperandLayout(0, G, 2))
    mbarrier.wait(q_arrived, 0)
    for i in range(num_masked):
        dq_RD, rest_RD, ds_RN = _round_of_queries(
            i, dq_RD, rest_RD, ds_RN, q_RD, do_RD, start_s_R, minus_d_R, k_ring, v_ring, scale_log2, first_query,
            (num_tiles - 1 - i) * N, num_keys, True, CAUSAL, N, MAIN, REST,
        )  # fmt: skip
    for i in range(num_masked, num_tiles):
        dq_RD, rest_RD, ds_RN = _round_of_queries(
            i, dq_RD, rest_RD, ds_RN, q_RD, do_RD, start_s_R, minus_d_R, k_ring, v_ring, scale_log2, first_query,
            (num_tiles - 1 - i) * N, num_keys, False, CAUSAL, N, MAIN, REST,
        )  # fmt: skip
    dq_RD, rest_RD = times(ds_RN, k_ring.slot(num_tiles - 1), dq_RD, rest_RD, MAIN, REST)
    if REST > 0:
        rest_RD = warpgroup_mma_wait(0, [rest_RD])
    dq_RD, ds_RN = warpgroup_mma_wait(0, [dq_RD, ds_RN])
    put(q_RD, dq_RD * scale, rest_RD * scale, MAIN, REST)  # the consumer's queries are done with
    tma.async_copy_shared_to_global(dq_tiles, [b, head, first_query, 0], q_RD)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_heads", "sharing", "num_queries", "num_keys", "num_padded"])
def backward_q_kernel(q_tiles, k_tiles, v_tiles, do_tiles, dq_tiles, start_s_ptr, minus_d_ptr, num_heads, sharing,
                      num_queries, num_keys, num_padded, scale, scale_log2, CAUSAL: gl.constexpr, N: gl.constexpr,
                      MAIN: gl.constexpr, REST: gl.constexpr, BOX: gl.constexpr, NUM_SLOTS: gl.constexpr,
                      CONSUMER_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr):  # fmt: skip
    """dQ of 128 queries of a head; the longest rows of a head first."""
    M: gl.constexpr = NUM_CONSUMERS * ROWS
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    ENOUGH: gl.constexpr = 2
    num_rows = gl.cdiv(num_queries, M)
    first_query = (num_rows - 1 - gl.program_id(0) % num_rows) * M
    b_head = gl.program_id(0) // num_rows
    b, head = b_head // num_heads, b_head % num_heads
    kv_head = head // sharing
    end = num_keys
    num_whole = num_keys // N
    if CAUSAL:
        end = gl.minimum(num_keys, first_query + M)
        num_whole = gl.minimum(num_whole, first_query // N)
    num_tiles = gl.cdiv(end, N)
    num_masked = num_tiles - num_whole
    q_own = own_tiles(q_tiles.dtype, BOX)
    do_own = own_tiles(q_tiles.dtype, BOX)
    q_arrived = barrier()
    k_ring = ring(q_tiles.dtype, N, BOX, NUM_SLOTS)
    v_ring = ring(q_tiles.dtype, N, BOX, ENOUGH)
    fence_async_shared()
    gl.warp_specialize([
        (_sum_over_keys, (dq_tiles, start_s_ptr, minus_d_ptr, b, head, b_head, first_query, num_tiles, num_masked,
                          num_keys, num_padded, scale, scale_log2, q_own, do_own, q_arrived, k_ring, v_ring,
                          FIRST, CAUSAL, N, MAIN, REST)),
        (_sum_over_keys, (dq_tiles, start_s_ptr, minus_d_ptr, b, head, b_head, first_query, num_tiles, num_masked,
                          num_keys, num_padded, scale, scale_log2, q_own, do_own, q_arrived, k_ring, v_ring,
                          SECOND, CAUSAL, N, MAIN, REST)),
        (_load_for_queries, (q_tiles, k_tiles, v_tiles, do_tiles, b, head, kv_head, first_query, num_tiles, q_own,
                             do_own, q_arrived, k_ring, v_ring, N)),
    ], [4, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
