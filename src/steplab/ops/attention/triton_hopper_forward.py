"""The forward kernel for Hopper GPUs in bf16 and fp16. See triton_hopper_tiles.py for how the work is divided.

A task is 128 queries of one head. Its tiles of keys come from the last that they see to the first, so that the masked
ones are done with first. A program takes one task after another: the tiles of the next are on their way while this one
ends. Where tasks are long there are as many programs as tasks, and the GPU hands them out.

Shape suffixes: M queries of a task, R rows (queries) of a consumer, N keys of a tile, D columns of the head dimension.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from steplab.ops.attention.triton_hopper_tiles import NUM_CONSUMERS, ROWS, put, ring, times, times_transposed

TASK = gl.constexpr(128)
"""Queries of a task: the rows of both consumers."""


@gluon.jit
def _task(number, num_tasks, num_heads, num_queries, num_keys, CAUSAL: gl.constexpr, N: gl.constexpr):
    """Batch, head, first query and number of tiles of keys of a program's number-th task; the longest of a head first.

    Every other round of tasks is dealt in reverse, so that who had a long one gets a short one.
    """
    num_programs = gl.num_programs(0)
    task = number * num_programs + gl.program_id(0)
    if number % 2 == 1:
        if (number + 1) * num_programs <= num_tasks:
            task = (number + 1) * num_programs - 1 - gl.program_id(0)
    tasks_a_head = gl.cdiv(num_queries, TASK)
    first_query = (tasks_a_head - 1 - task % tasks_a_head) * TASK
    b_head = task // tasks_a_head
    end = num_keys
    if CAUSAL:
        end = gl.minimum(num_keys, first_query + TASK)
    return b_head // num_heads, b_head % num_heads, first_query, gl.cdiv(end, N)


@gluon.jit
def _tasks_of_program(num_tasks):
    return gl.cdiv(num_tasks - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _load(q_tiles, k_tiles, v_tiles, num_tasks, num_heads, sharing, num_queries, num_keys, q_ring, k_ring, v_ring,
          CAUSAL: gl.constexpr, N: gl.constexpr):  # fmt: skip
    i = 0  # tiles of keys so far
    for number in range(_tasks_of_program(num_tasks)):
        b, head, first_query, num_tiles = _task(number, num_tasks, num_heads, num_queries, num_keys, CAUSAL, N)
        q_arrived = q_ring.room(number, q_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(q_tiles, [b, head, first_query, 0], q_arrived, q_ring.slot(number))
        for t in range(num_tiles):
            first_key = (num_tiles - 1 - t) * N
            k_arrived = k_ring.room(i, k_tiles.block_type.nbytes)
            tma.async_copy_global_to_shared(k_tiles, [b, head // sharing, first_key, 0], k_arrived, k_ring.slot(i))
            v_arrived = v_ring.room(i, v_tiles.block_type.nbytes)
            tma.async_copy_global_to_shared(v_tiles, [b, head // sharing, first_key, 0], v_arrived, v_ring.slot(i))
            i += 1


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
    # The largest is kept scaled: a product within a fused multiply-add is not rounded, and would differ from itself by
    # its rounding, so that what was summed shrank a little with every tile.
    new_largest_R = gl.maximum(largest_R, gl.max(s_RN, 1) * scale_log2)
    # A row that has seen nothing but -inf: any finite number gives its exponentials as the zeros that they are.
    base_R = gl.where(new_largest_R == float("-inf"), 0.0, new_largest_R)
    p_RN = gl.exp2(s_RN * scale_log2 - base_R[:, None])
    shrink_R = gl.exp2(largest_R - base_R)
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
def _attend(o_tiles, lse_ptr, num_tasks, num_heads, num_queries, num_keys, scale_log2, q_ring, k_ring, v_ring, o_own,
            CONSUMER: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
            APART: gl.constexpr):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    SOME: gl.constexpr = REST if REST > 0 else 16
    REST_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SOME, 16])
    first_tile = 0
    for number in range(_tasks_of_program(num_tasks)):
        b, head, first_query, num_tiles = _task(number, num_tasks, num_heads, num_queries, num_keys, CAUSAL, N)
        first_query += CONSUMER * ROWS
        q_RD = q_ring.take(number).slice(CONSUMER * ROWS, ROWS, dim=0)
        largest_R = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        sum_R = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        o_RD = gl.zeros([ROWS, MAIN], gl.float32, O)
        rest_RD = gl.zeros([ROWS, SOME], gl.float32, REST_O)
        s_RN = times_transposed(q_RD, k_ring.take(first_tile), gl.zeros([ROWS, N], gl.float32, S), MAIN, REST)
        s_RN = warpgroup_mma_wait(0, [s_RN])
        k_ring.release(first_tile)
        e_RN, largest_R, sum_R, _ = _softmax(
            s_RN, largest_R, sum_R, scale_log2, first_query, (num_tiles - 1) * N, num_keys, True, CAUSAL, N
        )
        p_RN = gl.convert_layout(e_RN.to(q_RD.dtype), gl.DotOperandLayout(0, O, 2))
        num_masked = 1
        if CAUSAL:
            num_masked = gl.minimum(num_tiles, gl.cdiv(TASK, N) + 1)
        for t in range(1, num_masked):
            o_RD, rest_RD, p_RN, largest_R, sum_R = _round(
                first_tile + t, o_RD, rest_RD, p_RN, largest_R, sum_R, q_RD, k_ring, v_ring, scale_log2, first_query,
                (num_tiles - 1 - t) * N, num_keys, True, CAUSAL, N, MAIN, REST,
            )  # fmt: skip
        for t in range(num_masked, num_tiles):
            o_RD, rest_RD, p_RN, largest_R, sum_R = _round(
                first_tile + t, o_RD, rest_RD, p_RN, largest_R, sum_R, q_RD, k_ring, v_ring, scale_log2, first_query,
                (num_tiles - 1 - t) * N, num_keys, False, CAUSAL, N, MAIN, REST,
            )  # fmt: skip
        if APART:
            q_ring.release(number)
        first_tile += num_tiles
        o_RD, rest_RD = times(p_RN, v_ring.take(first_tile - 1), o_RD, rest_RD, MAIN, REST)
        part_R = 1 / gl.where(sum_R == 0, 1.0, sum_R)
        if REST > 0:
            rest_RD = warpgroup_mma_wait(0, [rest_RD])
            rest_RD = rest_RD * gl.convert_layout(part_R, gl.SliceLayout(1, REST_O))[:, None]
        o_RD, p_RN = warpgroup_mma_wait(0, [o_RD, p_RN])
        v_ring.release(first_tile - 1)
        o_RD = o_RD * gl.convert_layout(part_R, gl.SliceLayout(1, O))[:, None]
        if APART:
            o_tile = o_own.index(CONSUMER)
            tma.store_wait(0)  # of the task before
        else:
            o_tile = q_RD  # the consumer's queries are done with
        put(o_tile, o_RD, rest_RD, MAIN, REST)
        tma.async_copy_shared_to_global(o_tiles, [b, head, first_query, 0], o_tile)
        queries = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        lse_R = (largest_R + gl.log2(sum_R)) * 0.6931471805599453  # log 2
        lse_ptrs = lse_ptr + (b * num_heads + head).to(gl.int64) * num_queries + queries
        gl.store(lse_ptrs, lse_R, mask=queries < num_queries)
        if not APART:
            tma.store_wait(0)
            q_ring.release(number)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tasks", "num_heads", "sharing", "num_queries", "num_keys"])
def forward_kernel(q_tiles, k_tiles, v_tiles, o_tiles, lse_ptr, num_tasks, num_heads, sharing, num_queries, num_keys,
                   scale_log2, CAUSAL: gl.constexpr, N: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
                   BOX: gl.constexpr, NUM_SLOTS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                   LOADER_REGISTERS: gl.constexpr):  # fmt: skip
    """Any number of programs up to num_tasks, which is that of tiles of 128 queries of all heads."""
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    # Whether the output goes through shared memory of its own, where there is room, or through that of the queries.
    APART: gl.constexpr = BOX <= 128
    ONE: gl.constexpr = 1
    q_ring = ring(q_tiles.dtype, TASK, BOX, ONE)
    k_ring = ring(q_tiles.dtype, N, BOX, NUM_SLOTS)
    v_ring = ring(q_tiles.dtype, N, BOX, NUM_SLOTS)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BOX], q_tiles.dtype)
    if APART:
        o_own = gl.allocate_shared_memory(q_tiles.dtype, [NUM_CONSUMERS, ROWS, BOX], layout)
    else:
        o_own = q_ring.tiles
    fence_async_shared()
    gl.warp_specialize([
        (_attend, (o_tiles, lse_ptr, num_tasks, num_heads, num_queries, num_keys, scale_log2, q_ring, k_ring, v_ring,
                   o_own, FIRST, CAUSAL, N, MAIN, REST, APART)),
        (_attend, (o_tiles, lse_ptr, num_tasks, num_heads, num_queries, num_keys, scale_log2, q_ring, k_ring, v_ring,
                   o_own, SECOND, CAUSAL, N, MAIN, REST, APART)),
        (_load, (q_tiles, k_tiles, v_tiles, num_tasks, num_heads, sharing, num_queries, num_keys, q_ring, k_ring,
                 v_ring, CAUSAL, N)),
    ], [4, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
