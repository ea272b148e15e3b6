"""The backward kernel for Hopper GPUs with two turns at the tensor cores a round, for tiles of 128 queries.

Three of these do not fit shared memory. One turn is for S and dP, one for dV, dK and dQ. In the latter the first
consumer waits for the second's dS, which that one has put into shared memory before it asks for its own turn; meanwhile
it stores its own, and multiplies that.

Shape suffixes are those of triton_hopper_gradients.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from .triton_hopper_gradients import (
    DS,
    KEYS,
    TURN,
    own,
    put_dq,
    start_dq,
    start_dv_dk,
    store_ds,
    tell_dq,
    wait_for_dv_dk,
    weigh,
    zero_at_run_time,
)
from .triton_hopper_tiles import ROWS, in_parts, let_pass, meet, scores


@gluon.jit
def _round_of_two_turns(i, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, room, scale_log2, first_key, first_query, num_queries,
                       num_keys, MASKED: gl.constexpr, CAUSAL: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr,
                       CONSUMER: gl.constexpr, FIRST: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """All products of the i-th tile."""
    zero = zero_at_run_time(i)
    OWN_TURN: gl.constexpr = TURN + CONSUMER
    NEXT_TURN: gl.constexpr = TURN + 1 - CONSUMER
    OWN_DS: gl.constexpr = DS + CONSUMER
    OTHERS_DS: gl.constexpr = DS + 1 - CONSUMER
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    room.wait(i)
    meet(OWN_TURN)
    s_RM = scores(in_parts(own(room, zero, 0, CONSUMER), MAIN, 0), room.queries(i), S, 0)
    dp_RM = scores(in_parts(own(room, zero, 1, CONSUMER), MAIN, 0), room.gradients(i), S, 0)
    let_pass(NEXT_TURN)
    weights, ds = weigh(i, s_RM, dp_RM, room, scale_log2, first_key, first_query, num_queries, num_keys, MASKED,
                        CAUSAL, M, 0)  # fmt: skip
    # The first has to wait for the second's dS in its turn, and may store its own then too: 1 to 2 % faster.
    if CONSUMER == 1:
        store_ds(i, ds, room, M, CONSUMER)
        let_pass(OTHERS_DS)
    meet(OWN_TURN)
    dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = start_dv_dk(
        i, weights, ds, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, room, MAIN, 0
    )
    dq_MW = gl.zeros([ROWS, W], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16]))
    DONE: gl.constexpr = ROWS if CONSUMER == 0 else 0
    if CONSUMER == 0:  # its own keys, which are the first, while it waits for the other's dS
        store_ds(i, ds, room, M, CONSUMER)
        let_pass(OTHERS_DS)
        fence_async_shared()  # the compiler adds the barrier of the four warps, each of which stored a part
        dq_MW = start_dq(i, dq_MW, room, zero, 0, ROWS, FIRST, W)
    meet(OWN_DS)
    fence_async_shared()
    dq_MW = start_dq(i, dq_MW, room, zero, DONE, KEYS - DONE, FIRST, W)
    let_pass(NEXT_TURN)
    dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = wait_for_dv_dk(0, weights, ds, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, 0)
    dq_MW = warpgroup_mma_wait(0, [dq_MW])
    put_dq(i, dq_MW, room, FIRST, W, CONSUMER)
    tell_dq(i, room, CONSUMER)
    room.release(i)
    return dk_RD, dk_rest_RD, dv_RD, dv_rest_RD


@gluon.jit
def rounds_of_two_turns(dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, room, scale_log2, first_key, start, step, first,
                        first_whole, end_whole, num_tiles, num_queries, num_keys, CAUSAL: gl.constexpr,
                        IN_A_ROW: gl.constexpr, M: gl.constexpr, MAIN: gl.constexpr, CONSUMER: gl.constexpr,
                        FIRST: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """All rounds, of each head from the first tile on, those from first_whole to end_whole unmasked: the gradients of
    the keys."""
    for which in range(IN_A_ROW):
        of_head = first + which * num_tiles
        for t in range(first_whole):
            dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = _round_of_two_turns(
                of_head + t, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, room, scale_log2, first_key, start + t * step,
                num_queries, num_keys, True, CAUSAL, M, MAIN, CONSUMER, FIRST, W,
            )  # fmt: skip
        for t in range(first_whole, end_whole):
            dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = _round_of_two_turns(
                of_head + t, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, room, scale_log2, first_key, start + t * step,
                num_queries, num_keys, False, CAUSAL, M, MAIN, CONSUMER, FIRST, W,
            )  # fmt: skip
        for t in range(end_whole, num_tiles):
            dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = _round_of_two_turns(
                of_head + t, dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, room, scale_log2, first_key, start + t * step,
                num_queries, num_keys, True, CAUSAL, M, MAIN, CONSUMER, FIRST, W,
            )  # fmt: skip
    return dk_RD, dk_rest_RD, dv_RD, dv_rest_RD
