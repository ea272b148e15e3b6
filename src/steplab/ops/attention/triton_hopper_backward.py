"""The backward kernel for Hopper GPUs in bf16 and fp16; docs/attention_kernels.md explains it.

A program has 128 keys of one head, or of two in a row that share keys. Two consumers (warp groups) have 64 keys each,
and each makes half of a query tile's dQ. A separate warp adds it to float32 sums in memory, which `attention_finish`
rounds.

Note "turns": sums of floats depend on their order. So every 128 queries of a head have a counter for each consumer's
half, and a program waits for its turn. It waits only for lower-numbered programs, which start earlier, so all
terminate.

Shape suffixes: R rows (keys) of a consumer, M queries of a tile, D columns of the head dimension, W columns of dQ that
a consumer makes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .triton_hopper_gradients import (
    BOTH_ARE_DONE,
    KEYS,
    PART,
    TURN,
    SharedStorage,
    zero_at_run_time,
)
from .triton_hopper_tiles import (
    NUM_CONSUMERS,
    ROWS,
    add_tile,
    allocate_parts,
    barrier_arrive,
    barrier_sync,
    load_parts,
    load_tile,
    new_mbarrier,
    store_parts,
    store_tile,
)
from .triton_hopper_turns import release_turn, rounds_of_a_turn, rounds_of_two_turns, wait_turn, written

ZERO = gl.constexpr(0)
ONE = gl.constexpr(1)


# --- the warps -----------------------------------------------------------------------------------------------------


@gluon.jit
def _tile(i, num_tiles, upwards):
    return gl.where(upwards, i, num_tiles - 1 - i)


@gluon.jit
def _load(q_tiles, k_tiles, v_tiles, do_tiles, minus_lse_tiles, minus_d_tiles, q_rest_tiles, do_rest_tiles, b, head,
          b_head, kv_head, first_key, first_query, num_tiles, upwards, num_padded, smem, M: gl.constexpr, MAIN:
          gl.constexpr, REST: gl.constexpr, IN_A_ROW: gl.constexpr):  # fmt: skip
    mbarrier.expect(smem.kv_arrived, k_tiles.block_type.nbytes + v_tiles.block_type.nbytes)
    load_tile(k_tiles, [b, kv_head, first_key, 0], smem.kv_arrived, smem.kv.index(0))
    load_tile(v_tiles, [b, kv_head, first_key, 0], smem.kv_arrived, smem.kv.index(1))
    for which in range(IN_A_ROW):
        for t in range(num_tiles):
            i = which * num_tiles + t
            query = first_query + _tile(t, num_tiles, upwards) * M
            number = (b_head + which) * num_padded + query
            slot = i % smem.num_slots
            mbarrier.wait(smem.empty.index(slot), ((i // smem.num_slots) & 1) ^ 1)
            arrived = smem.full.index(slot)
            num_bytes: gl.constexpr = q_tiles.block_type.nbytes + minus_d_tiles.block_type.nbytes
            if REST > 0:
                mbarrier.expect(arrived, 2 * (num_bytes + q_rest_tiles.block_type.nbytes))
            else:
                mbarrier.expect(arrived, 2 * num_bytes)
            load_parts(q_tiles, q_rest_tiles, b, head + which, query, arrived, smem.queries(i), MAIN, REST)
            load_parts(do_tiles, do_rest_tiles, b, head + which, query, arrived, smem.gradients(i), MAIN, REST)
            if M == ROWS:  # numbers have two slots, and were read before the tile's dS
                before_last = i - 2
                for c in gl.static_range(NUM_CONSUMERS):
                    mbarrier.wait(smem.ds_of(before_last, c), (before_last // 2) & 1, pred=before_last >= 0)
            load_tile(minus_lse_tiles, [number], arrived, smem.minus_lse(i))
            load_tile(minus_d_tiles, [number], arrived, smem.minus_d(i))


@gluon.jit
def _add_up(sums_tiles, turns_ptr, b_head, key_tile, num_key_tiles, first_query, num_tiles, upwards, num_padded, smem,
            CAUSAL: gl.constexpr, M: gl.constexpr, IN_A_ROW: gl.constexpr, PARTS: gl.constexpr, CONSUMER: gl.constexpr,
            FIRST_PART: gl.constexpr, END_PART: gl.constexpr):  # fmt: skip
    """Add a consumer's dQ of each tile to the sums in memory, when the program has the turn."""
    own = smem.dq_of(CONSUMER)
    turn = 0
    for which in range(IN_A_ROW):
        of_head = b_head + which
        for t in range(num_tiles):
            i = which * num_tiles + t
            query = first_query + _tile(t, num_tiles, upwards) * M
            turn_ptr = turns_ptr + (of_head * (num_padded // KEYS) + query // KEYS) * NUM_CONSUMERS + CONSUMER
            if (t == 0) | (query % KEYS == gl.where(upwards, 0, KEYS - M)):
                turn = key_tile
                if CAUSAL:  # upwards, programs start with the last keys
                    last = gl.minimum(query // KEYS, num_key_tiles - 1)
                    turn = gl.where(upwards, last - key_tile, key_tile)
                wait_turn(turn, turn_ptr)
            row = (of_head * num_padded + query) * (PARTS * ROWS // M)
            mbarrier.wait(smem.dq_full.index(CONSUMER), i & 1)
            for part in gl.static_range(FIRST_PART, END_PART):
                if turn == 0:
                    store_tile(sums_tiles, [row + part * ROWS, 0], own.index(part - FIRST_PART))
                else:
                    add_tile(sums_tiles, [row + part * ROWS, 0], own.index(part - FIRST_PART))
            tma.store_wait(0)
            mbarrier.arrive(smem.dq_empty.index(CONSUMER))
            if (t == num_tiles - 1) | (query % KEYS == gl.where(upwards, KEYS - M, 0)):
                written()
                release_turn(turn_ptr)


@gluon.jit
def _sum_over_queries(dk_tiles, dv_tiles, shared_ptr, members_ptr, b, head, kv_head, b_kv_head, sharing, key_tile,
                      num_key_tiles, first_key, first_query, num_tiles, num_masked, num_whole, upwards, num_queries,
                      num_keys, scale, scale_log2, smem, CONSUMER: gl.constexpr, CAUSAL: gl.constexpr, GROUPED:
                      gl.constexpr, IN_A_ROW: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
                      FIRST: gl.constexpr, W: gl.constexpr):  # fmt: skip
    G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    SOME: gl.constexpr = REST if REST > 0 else 16
    REST_G: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SOME, 16])
    first_key += CONSUMER * ROWS
    dk_RD = gl.zeros([ROWS, MAIN], gl.float32, G)
    dv_RD = gl.zeros([ROWS, MAIN], gl.float32, G)
    dk_rest_RD = gl.zeros([ROWS, SOME], gl.float32, REST_G)
    dv_rest_RD = gl.zeros([ROWS, SOME], gl.float32, REST_G)
    sums = dk_RD, dk_rest_RD, dv_RD, dv_rest_RD
    mbarrier.wait(smem.kv_arrived, 0)
    TURN_OF_0: gl.constexpr = TURN + 0
    if CONSUMER == 1:
        barrier_arrive(TURN_OF_0)
    # Tiles are masked at the diagonal and at the end of the queries, and visited from either.
    num_ended = num_tiles - gl.maximum(num_masked, num_whole)
    start = gl.where(upwards, first_query, first_query + (num_tiles - 1) * M)
    step = gl.where(upwards, M, -M)
    first_whole = gl.where(upwards, num_masked, num_ended)
    end_whole = num_tiles - gl.where(upwards, num_ended, num_masked)
    # A zero, unknown to the compiler: else it derives each tile's addresses from the previous tile's, for which no
    # registers are left.
    first = zero_at_run_time(num_tiles)
    problem = scale_log2, num_queries, num_keys
    rounds = start, step, first, first_whole, end_whole, num_tiles
    if M > ROWS:
        sums = rounds_of_two_turns(
            sums, smem, problem, first_key, rounds, CAUSAL, IN_A_ROW, M, MAIN, CONSUMER, FIRST, W,
        )  # fmt: skip
    elif num_tiles > 0:
        sums = rounds_of_a_turn(
            sums, smem, problem, first_key, rounds, CAUSAL, IN_A_ROW, M, MAIN, REST, CONSUMER, FIRST, W,
        )  # fmt: skip
    dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = sums
    if CONSUMER == 0:
        barrier_sync(TURN_OF_0)  # balances the other's last arrival
    # dK and dV replace the keys and values, which dQ of both consumers reads.
    barrier_sync(BOTH_ARE_DONE)
    member, num_members = 0, sharing // IN_A_ROW
    if GROUPED:
        member = head % sharing // IN_A_ROW
        SIZE: gl.constexpr = ROWS * (MAIN + REST)
        number = (b_kv_head * num_key_tiles + key_tile) * NUM_CONSUMERS + CONSUMER
        at = shared_ptr + number.to(gl.int64) * (2 * SIZE)
        is_first, is_last = member == 0, member == num_members - 1
        wait_turn(member * 4, members_ptr + number)
        # All are loaded before any is stored, so that the loads overlap.
        dk_RD += _from_those_before(at, is_first, MAIN, G)
        dv_RD += _from_those_before(at + SIZE, is_first, MAIN, G)
        if REST > 0:
            dk_rest_RD += _from_those_before(at + ROWS * MAIN, is_first, REST, REST_G)
            dv_rest_RD += _from_those_before(at + SIZE + ROWS * MAIN, is_first, REST, REST_G)
        _for_the_next(at, dk_RD, is_last)
        _for_the_next(at + SIZE, dv_RD, is_last)
        if REST > 0:
            _for_the_next(at + ROWS * MAIN, dk_rest_RD, is_last)
            _for_the_next(at + SIZE + ROWS * MAIN, dv_rest_RD, is_last)
        release_turn(members_ptr + number)  # by each of four warps
    if member == num_members - 1:
        k_own = smem.kv.index(0).slice(CONSUMER * ROWS, ROWS, dim=0)
        v_own = smem.kv.index(1).slice(CONSUMER * ROWS, ROWS, dim=0)
        store_parts(k_own, dk_RD * scale, dk_rest_RD * scale, MAIN, REST)
        store_parts(v_own, dv_RD, dv_rest_RD, MAIN, REST)
        store_tile(dk_tiles, [b, kv_head, first_key, 0], k_own)
        store_tile(dv_tiles, [b, kv_head, first_key, 0], v_own)
        tma.store_wait(0)


@gluon.constexpr_function
def _in_fours():
    """Layout of sums between programs: a thread has four in a row, a warp 512 bytes."""
    return gl.BlockedLayout([4], [32], [4], [0])


@gluon.jit
def _from_those_before(at, is_first, W: gl.constexpr, layout: gl.constexpr):
    loaded = gl.load(at + gl.arange(0, ROWS * W, _in_fours()), mask=not is_first, other=0.0, cache_modifier=".cg")
    # A thread's four numbers are two columns of two rows, within eight columns. The digits of a column's number: which
    # eight, the thread, which of two; of a row's: the warp, which of two, the thread.
    x_RW = loaded.reshape([W // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([ROWS, W])
    return gl.convert_layout(x_RW, layout, assert_trivial=True)


@gluon.jit
def _for_the_next(at, x_RW, is_last):
    W: gl.constexpr = x_RW.shape[1]
    x = x_RW.reshape([4, 2, 8, W // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([ROWS * W])
    x = gl.convert_layout(x, _in_fours(), assert_trivial=True)
    gl.store(at + gl.arange(0, ROWS * W, _in_fours()), x, mask=not is_last)


@gluon.jit
def _barriers(num: gl.constexpr, num_arrivals: gl.constexpr):
    """Barriers, each completed by num_arrivals arrivals. Allocate barriers of different purposes separately: the
    compiler would take them for one, and make the warps of a group meet between a wait for one and an arrival at
    another."""
    made = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(made.index(i), count=num_arrivals)
    return made


@gluon.jit
def _task(heads_in_all, heads_a_group, num_upwards, sharing, num_key_tiles, CAUSAL: gl.constexpr,
          IN_A_ROW: gl.constexpr):  # fmt: skip
    """First head and tile of keys of a program, and True if it visits the queries upwards.

    Heads in a row count as one. Heads that share keys add to each other's dK and dV, so all first ones precede all
    second ones. Heads go in groups whose queries fit the L2 cache. Under a causal mask a group begins with the last
    keys and visits the queries upwards, each program a tile behind the one it waits for. The last group, from head
    num_upwards on, begins with the longest programs, so that all end together, and visits the queries downwards.
    """
    programs_a_group = heads_a_group * num_key_tiles
    first = gl.program_id(0) // programs_a_group * heads_a_group
    heads = gl.minimum(heads_a_group, heads_in_all // IN_A_ROW - first)  # the last group may have fewer
    within = gl.program_id(0) % programs_a_group
    position = first + within % heads
    kv_heads_in_all = heads_in_all // sharing
    b_head = position % kv_heads_in_all * sharing + position // kv_heads_in_all * IN_A_ROW
    upwards = first < num_upwards
    key_tile = within // heads
    if CAUSAL:
        key_tile = gl.where(upwards, num_key_tiles - 1 - key_tile, key_tile)
    return b_head, key_tile, upwards


@gluon.jit(do_not_specialize=["heads_in_all", "heads_a_group", "num_upwards", "num_heads", "sharing", "num_queries",
                              "num_keys", "num_padded"])  # fmt: skip
def attention_backward(q_tiles, k_tiles, v_tiles, do_tiles, sums_tiles, dk_tiles, dv_tiles, minus_lse_tiles,
                       minus_d_tiles, turns_ptr, shared_ptr, q_rest_tiles, do_rest_tiles, heads_in_all, heads_a_group,
                       num_upwards, num_heads, sharing, num_queries, num_keys, num_padded, scale, scale_log2,
                       CAUSAL: gl.constexpr, GROUPED: gl.constexpr, IN_A_ROW: gl.constexpr, M: gl.constexpr,
                       MAIN: gl.constexpr, REST: gl.constexpr, BOX: gl.constexpr, NUM_SLOTS: gl.constexpr,
                       CONSUMER_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr):  # fmt: skip
    """The part of dK and dV of 128 keys that comes from IN_A_ROW heads of queries, and their dQ from these keys. If a
    head has no rest of columns, its rest tiles are None."""
    # Consumers halve dQ's queries, or its columns, or one has the main columns and the other the rest.
    W_0: gl.constexpr = MAIN // 2 if M == ROWS and REST == 0 else MAIN
    W_1: gl.constexpr = REST if REST > 0 else W_0
    PARTS_0: gl.constexpr = W_0 // PART
    PARTS: gl.constexpr = PARTS_0 + (W_1 + PART - 1) // PART  # the rest of a partly filled one is never read
    num_key_tiles = gl.cdiv(num_keys, KEYS)
    members_ptr = turns_ptr + NUM_CONSUMERS * heads_in_all * (num_padded // KEYS)  # behind the turns of all queries
    b_head, key_tile, upwards = _task(
        heads_in_all, heads_a_group, num_upwards, sharing, num_key_tiles, CAUSAL, IN_A_ROW
    )
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
    kv_arrived = new_mbarrier()
    mains, rests = allocate_parts(k_tiles.dtype, 2 * NUM_SLOTS, M, MAIN, REST)
    number_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    numbers = gl.allocate_shared_memory(gl.float32, [4, M], number_layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, M], k_tiles.dtype)
    ds_parts = gl.allocate_shared_memory(k_tiles.dtype, [2, KEYS, M], ds_layout)
    part_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    dq_0 = gl.allocate_shared_memory(gl.float32, [PARTS_0, ROWS, PART], part_layout)
    dq_1 = gl.allocate_shared_memory(gl.float32, [PARTS - PARTS_0, ROWS, PART], part_layout)
    full = _barriers(NUM_SLOTS, 1)
    empty = _barriers(NUM_SLOTS, NUM_CONSUMERS)
    # Larger tiles have named barriers for dS. A barrier that nothing used would be dead at once: the compiler would
    # reuse its bytes, into which its first bits might still arrive.
    ds_full = full
    if M == ROWS:
        ds_full = _barriers(2 * NUM_CONSUMERS, 1)
    dq_full = _barriers(NUM_CONSUMERS, 1)
    dq_empty = _barriers(NUM_CONSUMERS, 1)
    smem = SharedStorage(
        kv, kv_arrived, mains, rests, numbers, full, empty, ds_parts, ds_full, dq_0, dq_1, dq_full, dq_empty, NUM_SLOTS
    )
    fence_async_shared()
    gl.warp_specialize([
        (_sum_over_queries, (dk_tiles, dv_tiles, shared_ptr, members_ptr, b, head, kv_head, b_kv_head, sharing,
                             key_tile, num_key_tiles, first_key, first_query, num_tiles, num_masked, num_whole, upwards,
                             num_queries, num_keys, scale, scale_log2, smem, ZERO, CAUSAL, GROUPED, IN_A_ROW, M, MAIN,
                             REST, ZERO, W_0)),
        (_sum_over_queries, (dk_tiles, dv_tiles, shared_ptr, members_ptr, b, head, kv_head, b_kv_head, sharing,
                             key_tile, num_key_tiles, first_key, first_query, num_tiles, num_masked, num_whole, upwards,
                             num_queries, num_keys, scale, scale_log2, smem, ONE, CAUSAL, GROUPED, IN_A_ROW, M, MAIN,
                             REST, W_0, W_1)),
        (_load, (q_tiles, k_tiles, v_tiles, do_tiles, minus_lse_tiles, minus_d_tiles, q_rest_tiles, do_rest_tiles, b,
                 head, b_head, kv_head, first_key, first_query, num_tiles, upwards, num_padded, smem, M, MAIN, REST,
                 IN_A_ROW)),
        (_add_up, (sums_tiles, turns_ptr, b_head, key_tile, num_key_tiles, first_query, num_tiles, upwards, num_padded,
                   smem, CAUSAL, M, IN_A_ROW, PARTS, ZERO, ZERO, PARTS_0)),
        (_add_up, (sums_tiles, turns_ptr, b_head, key_tile, num_key_tiles, first_query, num_tiles, upwards, num_padded,
                   smem, CAUSAL, M, IN_A_ROW, PARTS, ONE, PARTS_0, PARTS)),
    ], [4, 1, 1, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
