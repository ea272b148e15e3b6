"""The turns of the backward kernel for Hopper GPUs: of programs at sums in memory, and of consumers at tensor cores.

With tiles of 64 queries a round has one turn: dV, dK and dQ of a tile, then S and dP of the next. The first consumer
makes its part of dQ a round late. Up to 96 columns a consumer holds its keys, up to 80 its values too, in registers.

With tiles of 128 queries, of which shared memory does not hold three, a round has two turns: S and dP, then dV, dK and
dQ. In the second turn the first consumer waits for the second's dS.

Shape suffixes: as in triton_hopper_gradients.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from .triton_hopper_gradients import (
    DS,
    KEYS,
    TURN,
    commit_dq,
    own,
    start_dq,
    start_dv_dk,
    store_dq,
    store_ds,
    wait_for_dv_dk,
    weigh,
    zero_at_run_time,
)
from .triton_hopper_tiles import ROWS, barrier_arrive, barrier_sync, in_parts, in_registers, scores


@gluon.jit
def _now(turn_ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [turn_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_turn(turn, turn_ptr):
    """Wait until this turn or a later one: of several waiting warps, one may end its turn before another looks."""
    now = _now(turn_ptr)
    while now < turn:
        now = _now(turn_ptr)
    # The copy engine's additions come after the reads. If it covered shared memory too, this would fence all memory of
    # the GPU, and take a full round trip.
    asm: gl.constexpr = "fence.proxy.async.global; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r", [now], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def written():
    """Wait until all of this warp's stores by the copy engine are in memory. (tma.store_wait: until they have been
    read.)"""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync -1; mov.b32 $0, 0;",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def release_turn(turn_ptr):
    """Pass the turn on; one thread of each warp does so, for the warp's stores."""
    gl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .b32 lane;
            bar.warp.sync -1;
            mov.u32 lane, %laneid;
            setp.eq.u32 first, lane, 0;
            @first red.release.gpu.global.add.s32 [$1], 1;
            mov.b32 $0, 0;
        }""",
        "=r,l",
        [turn_ptr],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


# --- S and dP ------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _is_held(which, rest):
    """True if a consumer holds its keys (0) or values (1) in registers, by the columns of the rest. With 80 columns of
    dK and dV, registers are left for both, with 96 for one."""
    return rest == 16 or (rest == 32 and which == 0)


@gluon.jit
def _held(smem, zero, WHICH: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
          CONSUMER: gl.constexpr):  # fmt: skip
    held = zero, zero
    if _is_held(WHICH, REST):
        held = in_registers(own(smem, zero, WHICH, CONSUMER), M, MAIN, REST)
    return held


@gluon.jit
def _scores(held, tile, smem, zero, WHICH: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
            CONSUMER: gl.constexpr):  # fmt: skip
    """Start S, of keys (0) and queries, or dP, of values (1) and gradients."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    if not _is_held(WHICH, REST):
        held = in_parts(own(smem, zero, WHICH, CONSUMER), MAIN, REST)
    return scores(held, tile, S, REST)


# --- the turns -----------------------------------------------------------------------------------------------------


@gluon.jit
def _start_part_of_dq(i, smem, zero, FIRST: gl.constexpr, W: gl.constexpr, CONSUMER: gl.constexpr):
    """Start the consumer's part of dQ of the i-th tile, once the other's dS exists. Before the first tile the result is
    arbitrary, and `commit_dq` does not announce it."""
    mbarrier.wait(smem.ds_of(i, 1 - CONSUMER), (i // 2) & 1, pred=i >= 0)
    fence_async_shared()
    dq_MW = gl.zeros([ROWS, W], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16]))
    return start_dq(i, dq_MW, smem, zero, 0, KEYS, FIRST, W)


@gluon.jit
def _weigh_for_both(i, s_RM, dp_RM, smem, problem, first_key, first_query, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
                    M: gl.constexpr, REST: gl.constexpr, CONSUMER: gl.constexpr):  # fmt: skip
    weights, ds = weigh(i, s_RM, dp_RM, smem, problem, first_key, first_query, MASKED, CAUSAL, M, REST)
    store_ds(i, ds, smem, M, CONSUMER)
    mbarrier.arrive(smem.ds_of(i, CONSUMER))
    return weights, ds


@gluon.jit
def _first_weights(i, k_held, v_held, smem, problem, first_key, first_query, CAUSAL: gl.constexpr, M: gl.constexpr,
                   MAIN: gl.constexpr, REST: gl.constexpr, CONSUMER: gl.constexpr):  # fmt: skip
    zero = zero_at_run_time(i)
    OWN_TURN: gl.constexpr = TURN + CONSUMER
    NEXT_TURN: gl.constexpr = TURN + 1 - CONSUMER
    smem.wait(i)
    barrier_sync(OWN_TURN)
    s_RM = _scores(k_held, smem.queries(i), smem, zero, 0, M, MAIN, REST, CONSUMER)
    dp_RM = _scores(v_held, smem.gradients(i), smem, zero, 1, M, MAIN, REST, CONSUMER)
    barrier_arrive(NEXT_TURN)
    return _weigh_for_both(i, s_RM, dp_RM, smem, problem, first_key, first_query, True, CAUSAL, M, REST, CONSUMER)


@gluon.jit
def _round_of_a_turn(i, k_held, v_held, weights, ds, sums, smem, problem, first_key, first_query, MASKED: gl.constexpr,
                     CAUSAL: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
                     CONSUMER: gl.constexpr, FIRST: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """All products of the previous tile, with its weights and dS, then S and dP of the i-th tile. S takes the registers
    of P and dS, and dP the registers of dQ: each starts when these are free. dQ is stored during other products, and
    announced, with a fence that waits for all stores, after the turn."""
    zero = zero_at_run_time(i)
    OWN_TURN: gl.constexpr = TURN + CONSUMER
    NEXT_TURN: gl.constexpr = TURN + 1 - CONSUMER
    of_dq = i - 2 + CONSUMER  # the first consumer is a round late
    smem.wait(i)
    barrier_sync(OWN_TURN)
    if REST > 0:  # dQ is stored during dV and dK, which read little shared memory
        dq_MW = _start_part_of_dq(of_dq, smem, zero, FIRST, W, CONSUMER)
        sums = start_dv_dk(i - 1, weights, ds, sums, smem, MAIN, REST)
        dq_MW = warpgroup_mma_wait(4, [dq_MW])  # dV and dK are two products each
        store_dq(of_dq, dq_MW, smem, FIRST, W, CONSUMER)
        sums = wait_for_dv_dk(0, weights, ds, sums, REST)
        s_RM = _scores(k_held, smem.queries(i), smem, zero, 0, M, MAIN, REST, CONSUMER)
    else:  # dQ is stored during S
        sums = start_dv_dk(i - 1, weights, ds, sums, smem, MAIN, REST)
        dq_MW = _start_part_of_dq(of_dq, smem, zero, FIRST, W, CONSUMER)
        sums = wait_for_dv_dk(1, weights, ds, sums, REST)
        s_RM = _scores(k_held, smem.queries(i), smem, zero, 0, M, MAIN, REST, CONSUMER)
        dq_MW = warpgroup_mma_wait(1, [dq_MW])
        store_dq(of_dq, dq_MW, smem, FIRST, W, CONSUMER)
    dp_RM = _scores(v_held, smem.gradients(i), smem, zero, 1, M, MAIN, REST, CONSUMER)
    barrier_arrive(NEXT_TURN)
    commit_dq(of_dq, smem, CONSUMER)
    smem.release(i - 1)
    weights, ds = _weigh_for_both(i, s_RM, dp_RM, smem, problem, first_key, first_query, MASKED, CAUSAL, M, REST,
                                  CONSUMER)  # fmt: skip
    return weights, ds, sums


@gluon.jit
def _last_products(i, weights, ds, sums, smem, MAIN: gl.constexpr, REST: gl.constexpr, CONSUMER: gl.constexpr,
                   FIRST: gl.constexpr, W: gl.constexpr):  # fmt: skip
    zero = zero_at_run_time(i)
    OWN_TURN: gl.constexpr = TURN + CONSUMER
    NEXT_TURN: gl.constexpr = TURN + 1 - CONSUMER
    barrier_sync(OWN_TURN)
    sums = start_dv_dk(i, weights, ds, sums, smem, MAIN, REST)
    of_dq = i - 1 + CONSUMER
    dq_MW = _start_part_of_dq(of_dq, smem, zero, FIRST, W, CONSUMER)
    barrier_arrive(NEXT_TURN)
    sums = wait_for_dv_dk(1, weights, ds, sums, REST)
    dq_MW = warpgroup_mma_wait(0, [dq_MW])
    store_dq(of_dq, dq_MW, smem, FIRST, W, CONSUMER)
    commit_dq(of_dq, smem, CONSUMER)
    if CONSUMER == 0:
        dq_MW = _start_part_of_dq(i, smem, zero, FIRST, W, CONSUMER)
        dq_MW = warpgroup_mma_wait(0, [dq_MW])
        store_dq(i, dq_MW, smem, FIRST, W, CONSUMER)
        commit_dq(i, smem, CONSUMER)
    return sums


@gluon.jit
def rounds_of_a_turn(sums, smem, problem, first_key, rounds, CAUSAL: gl.constexpr, IN_A_ROW: gl.constexpr,
                     M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, CONSUMER: gl.constexpr,
                     FIRST: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """All rounds of each head from the first tile on, unmasked from first_whole to end_whole; returns dK and dV.

    `problem`: factor of scores, numbers of queries and of keys. `rounds`: first query, step to the next tile's, first
    tile, first_whole, end_whole and number of tiles.
    """
    start, step, first, first_whole, end_whole, num_tiles = rounds
    k_held = _held(smem, first, 0, M, MAIN, REST, CONSUMER)
    v_held = _held(smem, first, 1, M, MAIN, REST, CONSUMER)
    weights, ds = _first_weights(first, k_held, v_held, smem, problem, first_key, start, CAUSAL, M, MAIN, REST,
                                 CONSUMER)  # fmt: skip
    for which in range(IN_A_ROW):
        of_head = first + which * num_tiles
        begin = gl.where(which == 0, 1, 0)
        for t in range(begin, first_whole):
            weights, ds, sums = _round_of_a_turn(
                of_head + t, k_held, v_held, weights, ds, sums, smem, problem, first_key, start + t * step, True,
                CAUSAL, M, MAIN, REST, CONSUMER, FIRST, W,
            )  # fmt: skip
        for t in range(gl.maximum(first_whole, begin), end_whole):
            weights, ds, sums = _round_of_a_turn(
                of_head + t, k_held, v_held, weights, ds, sums, smem, problem, first_key, start + t * step, False,
                CAUSAL, M, MAIN, REST, CONSUMER, FIRST, W,
            )  # fmt: skip
        for t in range(gl.maximum(end_whole, begin), num_tiles):
            weights, ds, sums = _round_of_a_turn(
                of_head + t, k_held, v_held, weights, ds, sums, smem, problem, first_key, start + t * step, True,
                CAUSAL, M, MAIN, REST, CONSUMER, FIRST, W,
            )  # fmt: skip
    return _last_products(first + IN_A_ROW * num_tiles - 1, weights, ds, sums, smem, MAIN, REST, CONSUMER, FIRST, W)


@gluon.jit
def _round_of_two_turns(i, sums, smem, problem, first_key, first_query, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
                        M: gl.constexpr, MAIN: gl.constexpr, CONSUMER: gl.constexpr, FIRST: gl.constexpr,
                        W: gl.constexpr):  # fmt: skip
    zero = zero_at_run_time(i)
    OWN_TURN: gl.constexpr = TURN + CONSUMER
    NEXT_TURN: gl.constexpr = TURN + 1 - CONSUMER
    OWN_DS: gl.constexpr = DS + CONSUMER
    OTHERS_DS: gl.constexpr = DS + 1 - CONSUMER
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    smem.wait(i)
    barrier_sync(OWN_TURN)
    s_RM = scores(in_parts(own(smem, zero, 0, CONSUMER), MAIN, 0), smem.queries(i), S, 0)
    dp_RM = scores(in_parts(own(smem, zero, 1, CONSUMER), MAIN, 0), smem.gradients(i), S, 0)
    barrier_arrive(NEXT_TURN)
    weights, ds = weigh(i, s_RM, dp_RM, smem, problem, first_key, first_query, MASKED, CAUSAL, M, 0)
    # The first has to wait for the second's dS in its turn, and can store its own then: 1 to 2 % faster.
    if CONSUMER == 1:
        store_ds(i, ds, smem, M, CONSUMER)
        barrier_arrive(OTHERS_DS)
    barrier_sync(OWN_TURN)
    sums = start_dv_dk(i, weights, ds, sums, smem, MAIN, 0)
    dq_MW = gl.zeros([ROWS, W], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16]))
    DONE: gl.constexpr = ROWS if CONSUMER == 0 else 0
    if CONSUMER == 0:  # its own keys first, while it waits for the other's dS
        store_ds(i, ds, smem, M, CONSUMER)
        barrier_arrive(OTHERS_DS)
        fence_async_shared()  # the compiler adds the barrier of the four warps; each stored a part
        dq_MW = start_dq(i, dq_MW, smem, zero, 0, ROWS, FIRST, W)
    barrier_sync(OWN_DS)
    fence_async_shared()
    dq_MW = start_dq(i, dq_MW, smem, zero, DONE, KEYS - DONE, FIRST, W)
    barrier_arrive(NEXT_TURN)
    sums = wait_for_dv_dk(0, weights, ds, sums, 0)
    dq_MW = warpgroup_mma_wait(0, [dq_MW])
    store_dq(i, dq_MW, smem, FIRST, W, CONSUMER)
    commit_dq(i, smem, CONSUMER)
    smem.release(i)
    return sums


@gluon.jit
def rounds_of_two_turns(sums, smem, problem, first_key, rounds, CAUSAL: gl.constexpr, IN_A_ROW: gl.constexpr,
                        M: gl.constexpr, MAIN: gl.constexpr, CONSUMER: gl.constexpr, FIRST: gl.constexpr,
                        W: gl.constexpr):  # fmt: skip
    start, step, first, first_whole, end_whole, num_tiles = rounds
    for which in range(IN_A_ROW):
        of_head = first + which * num_tiles
        for t in range(first_whole):
            sums = _round_of_two_turns(
                of_head + t, sums, smem, problem, first_key, start + t * step, True, CAUSAL, M, MAIN, CONSUMER, FIRST,
                W,
            )  # fmt: skip
        for t in range(first_whole, end_whole):
            sums = _round_of_two_turns(
                of_head + t, sums, smem, problem, first_key, start + t * step, False, CAUSAL, M, MAIN, CONSUMER, FIRST,
                W,
            )  # fmt: skip
        for t in range(end_whole, num_tiles):
            sums = _round_of_two_turns(
                of_head + t, sums, smem, problem, first_key, start + t * step, True, CAUSAL, M, MAIN, CONSUMER, FIRST,
                W,
            )  # fmt: skip
    return sums
