"""The backward kernel for Hopper GPUs in bf16 and fp16: all three gradients in one sweep, five products a tile.

A program has a head and 128 of its keys, 64 for each of two consumers, and goes over the queries that see them. A
consumer keeps its keys' dK and dV in registers; heads that share keys hand them on, each to the next one. What a tile
of queries gets of dQ is a sum over all keys: both consumers put their part of dS into shared memory, each multiplies
all of it with half the columns of the keys, or half of it with all columns, and a warp of its own has the copy engine
add the product to float32 sums in memory, which `attention_finish` rounds. Tiles are of 128 queries where the keys have
up to 64 columns, beyond of 64: what registers hold.

Note "turns": programs add to the same sums, and sums of floats depend on their order. So every 128 queries of a head
have a counter, and a program waits until it says that it is its turn. Nobody waits for long: programs of a head visit
the queries one behind the other. Programs start in the order of their numbers, and each waits for such alone as have
lower ones, so that all of them come to an end. Whose turn is the first stores instead of adding: nothing needs zeroing.

Note "the tensor cores": consumers take turns at them too. One starts S and dP, then the other; one starts dV, dK and
dQ, then the other. So exponentials, and what passes through shared memory, run under the other's products. For dQ
the first waits within its turn for the second's dS, which that one puts into shared memory before it asks for its own;
meanwhile the first stores its own dS, and multiplies it.

Shape suffixes: R rows (keys) of a consumer, M queries of a tile, D columns of the head dimension, W those of dQ that a
consumer makes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from steplab.ops.attention.triton_hopper_tiles import (
    NUM_CONSUMERS,
    ROWS,
    barrier,
    let_pass,
    meet,
    pack,
    put,
    scores,
    times,
    unpack,
    where_before,
)
from steplab.ops.attention.triton_hopper_turns import add_to_global, hand_on, wait_for, written

KEYS = gl.constexpr(128)
"""Keys of a program, and queries whose sums are handed on together."""
PART = gl.constexpr(32)
"""Columns of the sums that are added together, for 64 queries: 8 KB in a row."""
PANEL = gl.constexpr(8)
"""Columns of these that lie together, as [64, 8]: 32 bytes a query. A thread has two neighbouring columns of a query;
what half a warp stores at a time, of four queries and eight columns, is then 128 bytes in a row, each in a bank of its
own. In rows of 128 bytes as the copy engine swizzles them, they would lie in half of the banks."""

# Named barriers of the two consumers. For the last two add the consumer that waits there.
BOTH_ARE_DONE = gl.constexpr(0)
TURN = gl.constexpr(1)
DS = gl.constexpr(3)

ZERO = gl.constexpr(0)
ONE = gl.constexpr(1)


@gluon.jit
def _zero_at_run_time(i):
    """Zero, which the compiler does not know to be one.

    It would compute addresses in shared memory that are the same in every round before the loop, and keep them, for
    which no registers are left.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


# --- the warps -----------------------------------------------------------------------------------------------------


@gluon.jit
def _tile(i, num_tiles, upwards):
    """Which of a head's tiles of queries is visited i-th."""
    return gl.where(upwards, i, num_tiles - 1 - i)


@gluon.jit
def _load(q_tiles, k_tiles, v_tiles, do_tiles, minus_lse_tiles, minus_d_tiles, b, head, b_head, kv_head, first_key,
          first_query, num_tiles, upwards, num_padded, kv, kv_arrived, tiles, numbers, full, empty,
          M: gl.constexpr, NUM_SLOTS: gl.constexpr):  # fmt: skip
    mbarrier.expect(kv_arrived, k_tiles.block_type.nbytes + v_tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(k_tiles, [b, kv_head, first_key, 0], kv_arrived, kv.index(0))
    tma.async_copy_global_to_shared(v_tiles, [b, kv_head, first_key, 0], kv_arrived, kv.index(1))
    for i in range(num_tiles):
        query = first_query + _tile(i, num_tiles, upwards) * M
        number = b_head * num_padded + query
        slot = i % NUM_SLOTS
        mbarrier.wait(empty.index(slot), ((i // NUM_SLOTS) & 1) ^ 1)
        arrived = full.index(slot)
        mbarrier.expect(arrived, 2 * (q_tiles.block_type.nbytes + minus_d_tiles.block_type.nbytes))
        tma.async_copy_global_to_shared(q_tiles, [b, head, query, 0], arrived, tiles.index(2 * slot))
        tma.async_copy_global_to_shared(minus_lse_tiles, [number], arrived, numbers.index(2 * slot))
        tma.async_copy_global_to_shared(do_tiles, [b, head, query, 0], arrived, tiles.index(2 * slot + 1))
        tma.async_copy_global_to_shared(minus_d_tiles, [number], arrived, numbers.index(2 * slot + 1))


@gluon.jit
def _add_up(sums_tiles, turns_ptr, b_head, key_tile, num_key_tiles, first_query, num_tiles, upwards, num_padded,
            dq_parts, dq_full, dq_empty, CAUSAL: gl.constexpr, M: gl.constexpr,
            PARTS_0: gl.constexpr, PARTS_1: gl.constexpr):  # fmt: skip
    """Add what the consumers made of dQ to the sums in memory, in turn."""
    PARTS: gl.constexpr = PARTS_0 + PARTS_1
    turn = 0
    for i in range(num_tiles):
        query = first_query + _tile(i, num_tiles, upwards) * M
        turn_ptr = turns_ptr + b_head * (num_padded // KEYS) + query // KEYS
        if (i == 0) | (query % KEYS == gl.where(upwards, 0, KEYS - M)):
            turn = key_tile
            if CAUSAL:  # upwards, programs have started with the last keys
                last = gl.minimum(query // KEYS, num_key_tiles - 1)
                turn = gl.where(upwards, last - key_tile, key_tile)
            wait_for(turn, turn_ptr)
        row = (b_head * num_padded + query) * (PARTS * ROWS // M)
        for c in gl.static_range(NUM_CONSUMERS):
            mbarrier.wait(dq_full.index(c), i & 1)
            for part in gl.static_range(c * PARTS_0, PARTS_0 if c == 0 else PARTS):
                if turn == 0:
                    tma.async_copy_shared_to_global(sums_tiles, [row + part * ROWS, 0], dq_parts.index(part))
                else:
                    add_to_global(sums_tiles, [row + part * ROWS, 0], dq_parts.index(part))
        tma.store_wait(PARTS_1)
        mbarrier.arrive(dq_empty.index(0))
        tma.store_wait(0)
        mbarrier.arrive(dq_empty.index(1))
        if (i == num_tiles - 1) | (query % KEYS == gl.where(upwards, KEYS - M, 0)):
            written()
            hand_on(turn_ptr)


@gluon.jit
def _hand_over(ds_RM, ds_parts, ds_full, ds_slot, CONSUMER: gl.constexpr):
    """Put dS where both consumers take it from, and announce it to the other.

    The tensor cores read shared memory by another path than stores write it (PTX: the async proxy), so a fence has to
    lie between store and product. It may lie on either side of the barrier between them; the consumer that multiplies
    makes it behind the barrier, so that the announcement does not wait for it.
    """
    OTHER_WAITS: gl.constexpr = DS + 1 - CONSUMER
    ds_parts.index(ds_slot).slice(CONSUMER * ROWS, ROWS, dim=0).store(ds_RM)
    # With tiles of 64 queries a barrier in memory is 1 % faster than a named one, up to 16,384 positions.
    if ds_RM.shape[1] > ROWS:
        let_pass(OTHER_WAITS)
    else:
        mbarrier.arrive(ds_full.index(ds_slot))


@gluon.jit
def _times_keys(ds_NM, k_ND, sums_MW, FIRST_KEY: gl.constexpr, NUM_KEYS: gl.constexpr, FIRST: gl.constexpr,
                W: gl.constexpr):  # fmt: skip
    """Start dS^T times W columns of some keys, added to the sums unless the keys are the first; of a tile of 128
    queries, 64 of its rows times all columns."""
    ds_NM = ds_NM.slice(FIRST_KEY, NUM_KEYS, dim=0)
    k_ND = k_ND.slice(FIRST_KEY, NUM_KEYS, dim=0)
    if ds_NM.shape[1] > ROWS:
        ds_NM = ds_NM.slice(FIRST, ROWS, dim=1)
    else:
        k_ND = k_ND.slice(FIRST, W, dim=1)
    return warpgroup_mma(ds_NM.permute((1, 0)), k_ND, sums_MW, use_acc=FIRST_KEY > 0, is_async=True)


@gluon.constexpr_function
def _in_panels(width):
    """The layout in which 64 rows of so many columns are [64, PANEL] after [64, PANEL]."""
    column, row = 1, 1
    bases = []
    while column < PANEL:
        bases.append([0, column])
        column *= 2
    while row < ROWS:
        bases.append([row, 0])
        row *= 2
    while column < width:
        bases.append([0, column])
        column *= 2
    return gl.SharedLinearLayout(offset_bases=bases)


@gluon.jit
def _keep(dq_MW, dq_parts, FIRST: gl.constexpr, W: gl.constexpr):
    """Put dQ where the copy engine takes it from."""
    layout: gl.constexpr = _in_panels(W)
    dq_parts.index(FIRST // PART)._reinterpret(gl.float32, [ROWS, W], layout).store(dq_MW)
    fence_async_shared()


@gluon.jit
def _round(i, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, kv, tiles, numbers, full, empty, ds_parts, ds_full, dq_parts,
           dq_full, dq_empty, scale_log2, first_key, first_query, num_queries, num_keys, MASKED: gl.constexpr,
           CAUSAL: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, NUM_SLOTS: gl.constexpr,
           CONSUMER: gl.constexpr, FIRST: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """What the consumer's keys get from the i-th tile of queries, and its part of the tile's dQ."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OF_QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    P: gl.constexpr = gl.DotOperandLayout(0, dk_RD.type.layout, 2)
    dtype: gl.constexpr = kv.dtype
    NUM_STARTED: gl.constexpr = 1 if REST == 0 else 2
    WIDE: gl.constexpr = M > ROWS
    OWN_TURN: gl.constexpr = TURN + CONSUMER
    NEXT_TURN: gl.constexpr = TURN + 1 - CONSUMER
    OTHERS_DS: gl.constexpr = DS + CONSUMER
    zero = _zero_at_run_time(i)
    k_ND = kv.index(zero)
    k_RD = k_ND.slice(CONSUMER * ROWS, ROWS, dim=0)
    v_RD = kv.index(zero + 1).slice(CONSUMER * ROWS, ROWS, dim=0)
    slot = i % NUM_SLOTS
    ds_slot = i % 2
    q_MD = tiles.index(2 * slot)
    do_MD = tiles.index(2 * slot + 1)
    minus_lse_M = numbers.index(2 * slot)
    minus_d_M = numbers.index(2 * slot + 1)
    mbarrier.wait(full.index(slot), (i // NUM_SLOTS) & 1)
    meet(OWN_TURN)
    s_RM = scores(k_RD, q_MD, S, MAIN, REST)
    dp_RM = scores(v_RD, do_MD, S, MAIN, REST)
    let_pass(NEXT_TURN)
    s_RM = warpgroup_mma_wait(NUM_STARTED, [s_RM])
    p_RM = gl.exp2(s_RM * scale_log2 + minus_lse_M.load(OF_QUERIES)[None, :])
    if MASKED:
        keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        queries = first_query + gl.arange(0, M, OF_QUERIES)
        # Queries beyond the last are zeros, which a key of infinities makes NaN of.
        end = num_keys
        if CAUSAL:
            end = gl.minimum(queries + 1, num_keys)
        p_RM = where_before(p_RM, keys[:, None], gl.where(queries < num_queries, end, 0)[None, :], 0.0)
    dp_RM = warpgroup_mma_wait(0, [dp_RM])
    ds = pack(p_RM * (dp_RM + minus_d_M.load(OF_QUERIES)[None, :]), dtype)
    weights = pack(p_RM, dtype)
    # The first has to wait for the second's dS in its turn, and may store its own then too: 1 to 2 % faster.
    if CONSUMER == 1:
        _hand_over(unpack(ds, dtype, S), ds_parts, ds_full, ds_slot, CONSUMER)
    meet(OWN_TURN)
    dv_RD, dv_rest_RD = times(unpack(weights, dtype, P), do_MD, dv_RD, dv_rest_RD, MAIN, REST)
    dk_RD, dk_rest_RD = times(unpack(ds, dtype, P), q_MD, dk_RD, dk_rest_RD, MAIN, REST)
    if CONSUMER == 0:
        _hand_over(unpack(ds, dtype, S), ds_parts, ds_full, ds_slot, CONSUMER)
    ds_NM = ds_parts.index(ds_slot)
    dq_MW = gl.zeros([ROWS, W], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16]))
    DONE: gl.constexpr = ROWS if CONSUMER == 0 else 0
    if CONSUMER == 0:  # its own keys, which are the first, while it waits for the other's dS
        fence_async_shared()  # the compiler adds the barrier of the four warps, each of which stored a part
        dq_MW = _times_keys(ds_NM, k_ND, dq_MW, 0, ROWS, FIRST, W)
    if WIDE:
        meet(OTHERS_DS)
    else:
        mbarrier.wait(ds_full.index(ds_slot), (i // 2) & 1)
    fence_async_shared()
    dq_MW = _times_keys(ds_NM, k_ND, dq_MW, DONE, KEYS - DONE, FIRST, W)
    let_pass(NEXT_TURN)
    mbarrier.wait(dq_empty.index(CONSUMER), (i & 1) ^ 1, pred=i > 0)
    if REST > 0:
        dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, dq_MW, weights, ds = warpgroup_mma_wait(
            0, [dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, dq_MW, weights, ds]
        )
    else:
        dk_RD, dv_RD, dq_MW, weights, ds = warpgroup_mma_wait(0, [dk_RD, dv_RD, dq_MW, weights, ds])
    _keep(dq_MW, dq_parts, FIRST, W)
    mbarrier.arrive(dq_full.index(CONSUMER))
    mbarrier.arrive(empty.index(slot))
    return dk_RD, dk_rest_RD, dv_RD, dv_rest_RD


@gluon.jit
def _sum_over_queries(dk_tiles, dv_tiles, shared_ptr, members_ptr, b, head, kv_head, b_kv_head, sharing, key_tile,
                      num_key_tiles, first_key, first_query, num_tiles, num_masked, num_whole, upwards, num_queries,
                      num_keys, scale, scale_log2, kv, kv_arrived, tiles, numbers, full, empty, ds_parts, ds_full,
                      dq_parts, dq_full, dq_empty, CONSUMER: gl.constexpr, CAUSAL: gl.constexpr,
                      GROUPED: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
                      NUM_SLOTS: gl.constexpr, FIRST: gl.constexpr, W: gl.constexpr):  # fmt: skip
    G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    SOME: gl.constexpr = REST if REST > 0 else 16
    REST_G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SOME, 16])
    first_key += CONSUMER * ROWS
    k_own = kv.index(0).slice(CONSUMER * ROWS, ROWS, dim=0)
    v_own = kv.index(1).slice(CONSUMER * ROWS, ROWS, dim=0)
    dk_RD = gl.zeros([ROWS, MAIN], gl.float32, G)
    dv_RD = gl.zeros([ROWS, MAIN], gl.float32, G)
    dk_rest_RD = gl.zeros([ROWS, SOME], gl.float32, REST_G)
    dv_rest_RD = gl.zeros([ROWS, SOME], gl.float32, REST_G)
    mbarrier.wait(kv_arrived, 0)
    TURN_OF_0: gl.constexpr = TURN + 0
    if CONSUMER == 1:
        let_pass(TURN_OF_0)
    # Tiles are masked at the diagonal and at the end of the queries, and visited from either.
    num_ended = num_tiles - gl.maximum(num_masked, num_whole)
    start = gl.where(upwards, first_query, first_query + (num_tiles - 1) * M)
    step = gl.where(upwards, M, -M)
    first_whole = gl.where(upwards, num_masked, num_ended)
    end_whole = num_tiles - gl.where(upwards, num_ended, num_masked)
    # Zero: else the compiler computes addresses of each tile from those of the one before, for which no registers are
    # left.
    first_tile = _zero_at_run_time(num_tiles)
    for t in range(first_whole):
        dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = _round(
            first_tile + t, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, kv, tiles, numbers, full, empty,
            ds_parts, ds_full, dq_parts, dq_full, dq_empty, scale_log2, first_key, start + t * step, num_queries,
            num_keys, True, CAUSAL, M, MAIN, REST, NUM_SLOTS, CONSUMER, FIRST, W,
        )  # fmt: skip
    for t in range(first_whole, end_whole):
        dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = _round(
            first_tile + t, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, kv, tiles, numbers, full, empty,
            ds_parts, ds_full, dq_parts, dq_full, dq_empty, scale_log2, first_key, start + t * step, num_queries,
            num_keys, False, CAUSAL, M, MAIN, REST, NUM_SLOTS, CONSUMER, FIRST, W,
        )  # fmt: skip
    for t in range(end_whole, num_tiles):
        dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = _round(
            first_tile + t, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, kv, tiles, numbers, full, empty,
            ds_parts, ds_full, dq_parts, dq_full, dq_empty, scale_log2, first_key, start + t * step, num_queries,
            num_keys, True, CAUSAL, M, MAIN, REST, NUM_SLOTS, CONSUMER, FIRST, W,
        )  # fmt: skip
    if CONSUMER == 0:
        meet(TURN_OF_0)  # which the other has let it have once more
    # dK and dV go where the keys and values were, of which dQ of both consumers is made.
    meet(BOTH_ARE_DONE)
    member = 0
    if GROUPED:
        member = head % sharing
        SIZE: gl.constexpr = ROWS * (MAIN + REST)
        number = (b_kv_head * num_key_tiles + key_tile) * NUM_CONSUMERS + CONSUMER
        at = shared_ptr + number.to(gl.int64) * (2 * SIZE)
        wait_for(member * 4, members_ptr + number)
        dk_RD = _with_those_before(dk_RD, at, member, sharing, MAIN)
        dv_RD = _with_those_before(dv_RD, at + SIZE, member, sharing, MAIN)
        if REST > 0:
            dk_rest_RD = _with_those_before(dk_rest_RD, at + ROWS * MAIN, member, sharing, REST)
            dv_rest_RD = _with_those_before(dv_rest_RD, at + SIZE + ROWS * MAIN, member, sharing, REST)
        hand_on(members_ptr + number)  # by each of four warps
    if member == sharing - 1:
        put(k_own, dk_RD * scale, dk_rest_RD * scale, MAIN, REST)
        put(v_own, dv_RD, dv_rest_RD, MAIN, REST)
        tma.async_copy_shared_to_global(dk_tiles, [b, kv_head, first_key, 0], k_own)
        tma.async_copy_shared_to_global(dv_tiles, [b, kv_head, first_key, 0], v_own)
        tma.store_wait(0)


@gluon.jit
def _with_those_before(x_RW, at, member, sharing, W: gl.constexpr):
    """x and what the heads before have of it, which is handed on to the next one, unless there is none."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, x_RW.type.layout))[:, None]
    columns = gl.arange(0, W, gl.SliceLayout(0, x_RW.type.layout))[None, :]
    ptrs = at + rows * W + columns
    x_RW += gl.load(ptrs, mask=rows < gl.where(member > 0, ROWS, 0), other=0.0, cache_modifier=".cg")
    gl.store(ptrs, x_RW, mask=rows < gl.where(member < sharing - 1, ROWS, 0))
    return x_RW


@gluon.jit
def _barriers(num: gl.constexpr, num_arrivals: gl.constexpr):
    """Barriers, each completed by so many arrivals.

    Those of different purposes are not allocated together: the compiler would take them for one, and have the warps of
    a group meet between a wait for one and an arrival at another.
    """
    made = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(made.index(i), count=num_arrivals)
    return made


@gluon.jit
def _task(heads_in_all, heads_a_group, num_upwards, sharing, num_key_tiles, CAUSAL: gl.constexpr):
    """Head and tile of keys of a program, and whether it visits the queries upwards.

    First come the first of all heads that share keys, then the second of all: each adds to dK and dV of those before,
    which have ended by then. Heads go in groups whose queries the L2 cache holds together. Under a causal mask the
    first programs of a group have the last keys and visit the queries upwards, each a tile behind the program that it
    waits for. The last group, from head num_upwards on, has the longest programs first, so that all end together, and
    visits the queries downwards.
    """
    programs_a_group = heads_a_group * num_key_tiles
    first = gl.program_id(0) // programs_a_group * heads_a_group
    heads = gl.minimum(heads_a_group, heads_in_all - first)  # the last group may have fewer
    within = gl.program_id(0) % programs_a_group
    position = first + within % heads
    kv_heads_in_all = heads_in_all // sharing
    b_head = position % kv_heads_in_all * sharing + position // kv_heads_in_all
    upwards = first < num_upwards
    key_tile = within // heads
    if CAUSAL:
        key_tile = gl.where(upwards, num_key_tiles - 1 - key_tile, key_tile)
    return b_head, key_tile, upwards


@gluon.jit(do_not_specialize=["heads_in_all", "heads_a_group", "num_upwards", "num_heads", "sharing", "num_queries",
                              "num_keys", "num_padded"])  # fmt: skip
def attention_backward(q_tiles, k_tiles, v_tiles, do_tiles, sums_tiles, dk_tiles, dv_tiles, minus_lse_tiles,
                    minus_d_tiles, turns_ptr, shared_ptr, heads_in_all, heads_a_group, num_upwards, num_heads, sharing,
                    num_queries, num_keys, num_padded, scale, scale_log2, CAUSAL: gl.constexpr, GROUPED: gl.constexpr,
                    M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, BOX: gl.constexpr,
                    NUM_SLOTS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                    LOADER_REGISTERS: gl.constexpr):  # fmt: skip
    """What a head of queries has of dK and dV of 128 keys, and of dQ from them."""
    # Of dQ consumers halve the queries, or the columns, or one has the main columns and the other the rest.
    W_0: gl.constexpr = MAIN // 2 if M == ROWS and REST == 0 else MAIN
    W_1: gl.constexpr = 32 if REST > 0 else W_0
    PARTS_0: gl.constexpr = W_0 // 32
    PARTS_1: gl.constexpr = W_1 // 32
    num_key_tiles = gl.cdiv(num_keys, KEYS)
    members_ptr = turns_ptr + heads_in_all * (num_padded // KEYS)  # behind the turns of all queries
    b_head, key_tile, upwards = _task(heads_in_all, heads_a_group, num_upwards, sharing, num_key_tiles, CAUSAL)
    b, head = b_head // num_heads, b_head % num_heads
    b_kv_head, kv_head = b_head // sharing, head // sharing
    first_key = key_tile * KEYS
    first_query = 0
    num_tiles = gl.cdiv(num_queries, M)
    num_whole = num_queries // M
    num_masked = 0
    if CAUSAL:
        first_query = first_key
        num_tiles = gl.maximum(num_tiles - first_key // M, 0)
        num_whole = gl.maximum(num_whole - first_key // M, 0)
        num_masked = gl.minimum(num_tiles, KEYS // M)
    if first_key + KEYS > num_keys:
        num_masked = num_tiles
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BOX], k_tiles.dtype)
    kv = gl.allocate_shared_memory(k_tiles.dtype, [2, KEYS, BOX], kv_layout)
    kv_arrived = barrier()
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, BOX], k_tiles.dtype)
    tiles = gl.allocate_shared_memory(k_tiles.dtype, [2 * NUM_SLOTS, M, BOX], tile_layout)
    number_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * NUM_SLOTS, M], number_layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, M], k_tiles.dtype)
    ds_parts = gl.allocate_shared_memory(k_tiles.dtype, [2, KEYS, M], ds_layout)
    part_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    dq_parts = gl.allocate_shared_memory(gl.float32, [PARTS_0 + PARTS_1, ROWS, 32], part_layout)
    full = _barriers(NUM_SLOTS, 1)
    empty = _barriers(NUM_SLOTS, NUM_CONSUMERS)
    # Tiles of more queries have named barriers for dS. A barrier that nothing used would be dead once it is made: the
    # compiler would put others' bytes in its place, over which its first bits might still come.
    ds_full = full
    if M == ROWS:
        ds_full = _barriers(2, NUM_CONSUMERS)
    dq_full = _barriers(NUM_CONSUMERS, 1)
    dq_empty = _barriers(NUM_CONSUMERS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_sum_over_queries, (dk_tiles, dv_tiles, shared_ptr, members_ptr, b, head, kv_head, b_kv_head, sharing,
                             key_tile, num_key_tiles, first_key, first_query, num_tiles, num_masked, num_whole, upwards,
                             num_queries, num_keys, scale, scale_log2, kv, kv_arrived, tiles, numbers, full, empty,
                             ds_parts, ds_full, dq_parts, dq_full, dq_empty, ZERO, CAUSAL, GROUPED, M, MAIN, REST,
                             NUM_SLOTS, ZERO, W_0)),
        (_sum_over_queries, (dk_tiles, dv_tiles, shared_ptr, members_ptr, b, head, kv_head, b_kv_head, sharing,
                             key_tile, num_key_tiles, first_key, first_query, num_tiles, num_masked, num_whole, upwards,
                             num_queries, num_keys, scale, scale_log2, kv, kv_arrived, tiles, numbers, full, empty,
                             ds_parts, ds_full, dq_parts, dq_full, dq_empty, ONE, CAUSAL, GROUPED, M, MAIN, REST,
                             NUM_SLOTS, W_0, W_1)),
        (_load, (q_tiles, k_tiles, v_tiles, do_tiles, minus_lse_tiles, minus_d_tiles, b, head, b_head, kv_head,
                 first_key, first_query, num_tiles, upwards, num_padded, kv, kv_arrived, tiles, numbers, full, empty,
                 M, NUM_SLOTS)),
        (_add_up, (sums_tiles, turns_ptr, b_head, key_tile, num_key_tiles, first_query, num_tiles, upwards, num_padded,
                   dq_parts, dq_full, dq_empty, CAUSAL, M, PARTS_0, PARTS_1)),
    ], [4, 1, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
