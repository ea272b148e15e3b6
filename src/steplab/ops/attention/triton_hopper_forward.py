"""The forward kernel for Hopper GPUs in bf16 and fp16; docs/attention_kernels.md explains it.

A task is 64 queries of a head for each consumer; triton_schedule.py gives each program its tasks. A task visits tiles
of keys from the last visible to the first. Only the first tile is masked, because tiles have a multiple of 64 keys.
Consumers release tiles unread if their rows see none of the keys.

A row's subtracted maximum need not be exact: it changes only for a score that exceeds it by more than RAISE. Up to 96
columns a row's four threads exchange their maxima only if a vote of the warp finds such a score. From 80 columns on the
assembler waits for the second product before that branch; at 128 the vote no longer pays.

Shape suffixes: R rows (queries) of a consumer, N keys of a tile, D columns of the head dimension; Q the four threads of
a row, which have two of each 8 columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from .triton_hopper_tiles import (
    NUM_NAMES,
    ROWS,
    barrier_arrive,
    barrier_sync,
    in_parts,
    in_registers,
    load_parts,
    load_tile,
    named_ring,
    pack,
    ring,
    scores,
    store_parts,
    store_tile,
    times,
    unpack,
    where_before,
)

RAISE = gl.constexpr(8.0)
"""Rise of a row's largest score that changes the subtracted maximum, in powers of two. Weights are then at most 2^8,
with the same relative error in bf16 and fp16.
"""


@gluon.jit
def _num_tiles(first_query, num_keys, CAUSAL: gl.constexpr, N: gl.constexpr, TASK: gl.constexpr):
    end = num_keys
    if CAUSAL:
        end = gl.minimum(num_keys, first_query + TASK)
    return gl.cdiv(end, N)


@gluon.jit
def _num_hidden(first_query, num_tiles, num_keys, CAUSAL: gl.constexpr, N: gl.constexpr):
    hidden = 0
    if CAUSAL:
        hidden = num_tiles - gl.cdiv(gl.minimum(first_query + ROWS, num_keys), N)
    return hidden


@gluon.jit
def _load_next(main_tiles, rest_tiles, to, i, b, head, first_key, MAIN: gl.constexpr, REST: gl.constexpr):
    if REST > 0:
        arrived = to.acquire(i, main_tiles.block_type.nbytes + rest_tiles.block_type.nbytes)
    else:
        arrived = to.acquire(i, main_tiles.block_type.nbytes)
    load_parts(main_tiles, rest_tiles, b, head, first_key, arrived, to.slot(i), MAIN, REST)


@gluon.jit
def _load(q_tiles, k_tiles, v_tiles, k_rest_tiles, v_rest_tiles, tasks_ptr, row_length, num_heads, sharing, num_keys,
          q_ring, k_ring, v_ring, CAUSAL: gl.constexpr, N: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
          NUM_CONSUMERS: gl.constexpr):  # fmt: skip
    i = 0  # tiles of keys so far
    row = tasks_ptr + gl.program_id(0) * row_length
    for number in range(gl.load(row)):
        b_head, first_query = gl.load(row + 1 + 2 * number), gl.load(row + 2 + 2 * number)
        b, head = b_head // num_heads, b_head % num_heads
        num_tiles = _num_tiles(first_query, num_keys, CAUSAL, N, NUM_CONSUMERS * ROWS)
        for c in gl.static_range(NUM_CONSUMERS):
            n = number * NUM_CONSUMERS + c
            q_arrived = q_ring.acquire(n, q_tiles.block_type.nbytes)
            load_tile(q_tiles, [b, head, first_query + c * ROWS, 0], q_arrived, q_ring.slot(n))
        for t in range(num_tiles):
            first_key = (num_tiles - 1 - t) * N
            _load_next(k_tiles, k_rest_tiles, k_ring, i, b, head // sharing, first_key, MAIN, REST)
            _load_next(v_tiles, v_rest_tiles, v_ring, i, b, head // sharing, first_key, MAIN, REST)
            i += 1
    for slot in range(gl.minimum(i, k_ring.num_slots)):  # completes the arrivals of all barriers
        k_ring.wait_released(slot)
        v_ring.wait_released(slot)


@gluon.jit
def _by_threads(x_RC):
    return x_RC.reshape([x_RC.shape[0], x_RC.shape[1] // 8, 4, 2])


@gluon.jit
def _raised(largest_RQ, own_RQ):
    """The largest scores so far. If any thread of a warp has one that exceeds its largest by more than RAISE, they are
    raised to the maximum over a row's threads."""
    # A thread has two rows.
    asm: gl.constexpr = """{
        .reg .pred beyond;
        .reg .f32 a, b, other;
        mov.f32 $0, $2;
        mov.f32 $1, $3;
        setp.gt.f32 beyond, $4, $6;
        setp.gt.or.f32 beyond, $5, $7, beyond;
        vote.sync.any.pred beyond, beyond, -1;
        @!beyond bra DONE;
        shfl.sync.bfly.b32 other, $4, 2, 31, -1;
        max.f32 a, $4, other;
        shfl.sync.bfly.b32 other, $5, 2, 31, -1;
        max.f32 b, $5, other;
        shfl.sync.bfly.b32 other, a, 1, 31, -1;
        max.f32 a, a, other;
        shfl.sync.bfly.b32 other, b, 1, 31, -1;
        max.f32 b, b, other;
        max.f32 $0, $2, a;
        max.f32 $1, $3, b;
        DONE:
    }"""
    return gl.inline_asm_elementwise(
        asm,
        "=&f,=&f,f,f,f,f,f,f",
        [largest_RQ, own_RQ, largest_RQ + RAISE],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _softmax(s_RN, largest, sums, scale_log2, first_query, first_key, num_keys,
             MASKED: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, BY_THREADS: gl.constexpr):  # fmt: skip
    """Exponentials of one more tile of scores, the new largest scores and sums, and the factor that scales earlier
    output down. The largest scores and the sums are of rows [R]; if BY_THREADS, of each thread's part of a row, [R, Q].
    """
    if MASKED:
        keys = first_key + gl.arange(0, N, gl.SliceLayout(0, s_RN.type.layout))
        end = num_keys
        if CAUSAL:
            queries = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, s_RN.type.layout))
            end = gl.minimum(queries + 1, num_keys)[:, None]
        s_RN = where_before(s_RN, keys[None, :], end, float("-inf"))
    # The largest is kept already scaled. Within a fused multiply-add its product with the scale is not rounded, and
    # would differ from the rounded one: earlier sums would shrink a little with every tile.
    if BY_THREADS:
        s_RCQ2 = _by_threads(s_RN)
        new_largest = _raised(largest, gl.max(gl.max(s_RCQ2, 3), 1) * scale_log2)
    else:
        new_largest = gl.maximum(largest, gl.max(s_RN, 1) * scale_log2)
        if not MASKED:
            new_largest = gl.where(new_largest > largest + RAISE, new_largest, largest)
    # A row of -inf only: any finite number gives its exponentials as zeros.
    base = gl.where(new_largest == float("-inf"), 0.0, new_largest)
    if BY_THREADS:
        p_RCQ2 = gl.exp2(s_RCQ2 * scale_log2 - base.expand_dims(1).expand_dims(3))
        p_RN = p_RCQ2.reshape([ROWS, N])
        shrink = gl.exp2(largest - base)
        sums = sums * shrink + gl.sum(gl.sum(p_RCQ2, 3), 1)
    else:
        p_RN = gl.exp2(s_RN * scale_log2 - base[:, None])
        shrink = gl.exp2(largest - base)
        sums = sums * shrink + gl.sum(p_RN, 1)
    return p_RN, new_largest, sums, shrink


@gluon.jit
def _nothing_yet(layout: gl.constexpr, N: gl.constexpr, BY_THREADS: gl.constexpr):
    if BY_THREADS:
        sums = gl.sum(gl.sum(_by_threads(gl.zeros([ROWS, N], gl.float32, layout)), 3), 1)
    else:
        sums = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    return sums + float("-inf"), sums


@gluon.jit
def _of_rows(largest_RQ, sums_RQ, layout: gl.constexpr):
    return gl.convert_layout(gl.max(largest_RQ, 1), layout), gl.convert_layout(gl.sum(sums_RQ, 1), layout)


@gluon.jit
def _scaled(x_RD, by_R):
    return x_RD * gl.convert_layout(by_R, gl.SliceLayout(1, x_RD.type.layout))[:, None]


@gluon.constexpr_function
def _times_unless_one(num):
    """PTX: `num` numbers of two rows, alternating in pairs, times a factor for each row, unless all factors of a warp
    are one."""
    tests = f"setp.ne.f32 some, ${2 * num}, 0f3F800000; setp.ne.or.f32 some, ${2 * num + 2}, 0f3F800000, some;"
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * num + i};" for i in range(num))
    return (
        f"{{ .reg .pred some; {tests} vote.sync.any.pred some, some, -1; @!some bra DONE; {products} DONE: }}",
        ",".join(["=f"] * num + [str(i) for i in range(num)] + ["f"] * num),
    )


@gluon.jit
def _shrunk(x_RD, by, BY_THREADS: gl.constexpr):
    """x times a factor for each row, or for each thread of a row; a warp with only factors of one does nothing."""
    NUM: gl.constexpr = x_RD.shape[1] // 2  # of a thread
    asm: gl.constexpr = _times_unless_one(NUM)[0]
    operands: gl.constexpr = _times_unless_one(NUM)[1]
    if BY_THREADS:
        x = _by_threads(x_RD)
        by = gl.convert_layout(by, gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))).expand_dims(1).expand_dims(3)
    else:
        x = x_RD
        by = gl.convert_layout(by, gl.SliceLayout(1, x.type.layout))[:, None]
    x, by = gl.broadcast(x, by)
    x = gl.inline_asm_elementwise(asm, operands, [x, by], dtype=gl.float32, is_pure=True, pack=NUM)
    return gl.convert_layout(x.reshape(x_RD.shape), x_RD.type.layout, assert_trivial=True)


@gluon.jit
def _round(i, o_RD, rest_RD, p, largest, sums, queries, k_ring, v_ring, scale_log2, first_query, first_key, num_keys,
           CAUSAL: gl.constexpr, N: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
           CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr):  # fmt: skip
    """The scores of tile i, and during their exponentials the output of tile i - 1, whose packed weights are p."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    BY_THREADS: gl.constexpr = MAIN + REST <= 96
    NUM_STARTED: gl.constexpr = 1 if REST == 0 else 2
    DTYPE: gl.constexpr = k_ring.mains.dtype
    NEXT: gl.constexpr = (CONSUMER + 1) % NUM_CONSUMERS
    k_parts = k_ring.wait(i)
    barrier_sync(CONSUMER)
    s_RN = scores(queries, k_parts, S, REST)
    p_RN = unpack(p, DTYPE, gl.DotOperandLayout(0, O, 2))
    o_RD, rest_RD = times(p_RN, v_ring.wait(i - 1), o_RD, rest_RD, REST)
    barrier_arrive(NEXT)
    s_RN = warpgroup_mma_wait(NUM_STARTED, [s_RN])
    k_ring.release(i)
    e_RN, largest, sums, shrink = _softmax(
        s_RN, largest, sums, scale_log2, first_query, first_key, num_keys, False, CAUSAL, N, BY_THREADS
    )
    if REST > 0:
        o_RD, rest_RD, p = warpgroup_mma_wait(0, [o_RD, rest_RD, p])
        rest_RD = _shrunk(rest_RD, shrink, BY_THREADS)
    else:
        o_RD, p = warpgroup_mma_wait(0, [o_RD, p])
    v_ring.release(i - 1)
    p = pack(e_RN, DTYPE)  # before the branch, where it overlaps with exponentials
    return _shrunk(o_RD, shrink, BY_THREADS), rest_RD, p, largest, sums


@gluon.jit
def _for_scores(q_RD, N: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr):
    if MAIN + REST > 64 and MAIN + REST <= 128:
        queries = in_registers(q_RD, N, MAIN, REST)
    else:
        queries = in_parts(q_RD, MAIN, REST)
    return queries


@gluon.jit
def _attend(o_tiles, lse_ptr, tasks_ptr, row_length, num_heads, num_queries, num_keys, scale_log2, q_ring, k_ring,
            v_ring, o_own, CONSUMER: gl.constexpr, CAUSAL: gl.constexpr, N: gl.constexpr, MAIN: gl.constexpr,
            REST: gl.constexpr, APART: gl.constexpr, NUM_CONSUMERS: gl.constexpr):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    BY_THREADS: gl.constexpr = MAIN + REST <= 96
    SOME: gl.constexpr = REST if REST > 0 else 16
    REST_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SOME, 16])
    LAST: gl.constexpr = NUM_CONSUMERS - 1
    FIRST: gl.constexpr = 0
    NEXT: gl.constexpr = (CONSUMER + 1) % NUM_CONSUMERS
    if CONSUMER == LAST:
        barrier_arrive(FIRST)
    first_tile = 0
    row = tasks_ptr + gl.program_id(0) * row_length
    next_head, next_query = gl.load(row + 1), gl.load(row + 2)
    for number in range(gl.load(row)):
        b_head, first_query = next_head, next_query
        next_head, next_query = gl.load(row + 3 + 2 * number), gl.load(row + 4 + 2 * number)  # they come from memory
        num_tiles = _num_tiles(first_query, num_keys, CAUSAL, N, NUM_CONSUMERS * ROWS)
        first_query += CONSUMER * ROWS
        own = number * NUM_CONSUMERS + CONSUMER
        queries = _for_scores(q_ring.wait(own), N, MAIN, REST)
        hidden = _num_hidden(first_query, num_tiles, num_keys, CAUSAL, N)
        for t in range(hidden):
            k_ring.wait(first_tile + t)
            k_ring.release(first_tile + t)
        s_RN = scores(queries, k_ring.wait(first_tile + hidden), S, REST)
        s_RN = warpgroup_mma_wait(0, [s_RN])
        k_ring.release(first_tile + hidden)
        largest, sums = _nothing_yet(S, N, BY_THREADS)
        # The only tile in which some query sees some keys but not all.
        e_RN, largest, sums, _ = _softmax(
            s_RN, largest, sums, scale_log2, first_query, (num_tiles - 1 - hidden) * N, num_keys, True, CAUSAL, N,
            BY_THREADS,
        )  # fmt: skip
        p = pack(e_RN, o_own.dtype)
        o_RD = gl.zeros([ROWS, MAIN], gl.float32, O)
        rest_RD = gl.zeros([ROWS, SOME], gl.float32, REST_O)
        for t in range(hidden):
            v_ring.wait(first_tile + t)
            v_ring.release(first_tile + t)
            barrier_sync(CONSUMER)  # a turn that it does not need
            barrier_arrive(NEXT)
        for t in range(hidden + 1, num_tiles):
            o_RD, rest_RD, p, largest, sums = _round(
                first_tile + t, o_RD, rest_RD, p, largest, sums, queries, k_ring, v_ring, scale_log2, first_query,
                (num_tiles - 1 - t) * N, num_keys, CAUSAL, N, MAIN, REST, CONSUMER, NUM_CONSUMERS,
            )  # fmt: skip
        if APART:
            q_ring.release(own)
        first_tile += num_tiles
        p_RN = unpack(p, o_own.dtype, gl.DotOperandLayout(0, O, 2))
        o_RD, rest_RD = times(p_RN, v_ring.wait(first_tile - 1), o_RD, rest_RD, REST)
        if BY_THREADS:
            largest, sums = _of_rows(largest, sums, gl.SliceLayout(1, S))
        part_R = 1 / gl.where(sums == 0, 1.0, sums)
        if REST > 0:
            rest_RD = warpgroup_mma_wait(0, [rest_RD])
            rest_RD = _scaled(rest_RD, part_R)
        o_RD, p = warpgroup_mma_wait(0, [o_RD, p])
        v_ring.release(first_tile - 1)
        if APART:
            o_tile = o_own.index(CONSUMER)
            tma.store_wait(0)  # of the task before
        else:
            o_tile = q_ring.slot(own)  # the consumer has finished with its queries
        store_parts(o_tile, _scaled(o_RD, part_R), rest_RD, MAIN, REST)
        at = [b_head // num_heads, b_head % num_heads, first_query, 0]
        store_tile(o_tiles, at, o_tile)
        positions = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        lse_R = (largest + gl.log2(sums)) * 0.6931471805599453  # log 2
        lse_ptrs = lse_ptr + b_head.to(gl.int64) * num_queries + positions
        gl.store(lse_ptrs, lse_R, mask=positions < num_queries)
        if not APART:
            tma.store_wait(0)
            q_ring.release(own)
    tma.store_wait(0)
    if CONSUMER == FIRST:
        barrier_sync(FIRST)  # balances the last consumer's extra arrival


@gluon.jit(do_not_specialize=["row_length", "num_heads", "sharing", "num_queries", "num_keys"])
def attention_forward(q_tiles, k_tiles, v_tiles, o_tiles, lse_ptr, tasks_ptr, k_rest_tiles, v_rest_tiles, row_length,
                      num_heads, sharing, num_queries, num_keys, scale_log2, CAUSAL: gl.constexpr, N: gl.constexpr,
                      NUM_CONSUMERS: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, BOX: gl.constexpr,
                      NUM_SLOTS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                      LOADER_REGISTERS: gl.constexpr):  # fmt: skip
    """A program per row of tasks_ptr [programs, row_length], from task_table; if a head has no rest of columns, its
    rest tiles are None."""
    C0: gl.constexpr = 0
    C1: gl.constexpr = 1
    C2: gl.constexpr = 2
    # True if the output goes through separate shared memory, where there is room; else through the queries'.
    APART: gl.constexpr = BOX <= 128
    ONE: gl.constexpr = 1
    q_ring = ring(q_tiles.dtype, ROWS, BOX, NUM_CONSUMERS, ONE)  # a slot for each consumer
    gl.static_assert(N % ROWS == 0, "a consumer would have more than one masked tile")
    # The loader alternates keys and values, and a consumer returns the values of hidden tiles only after the first keys
    # that it sees: until then the slots have to hold all of them.
    gl.static_assert((NUM_CONSUMERS - 1) * ROWS <= NUM_SLOTS * N, "more hidden tiles than slots")
    # Named barriers: first the consumers' turns, then the slots of keys, then the slots of values.
    V_NAME: gl.constexpr = NUM_CONSUMERS + NUM_SLOTS
    gl.static_assert(V_NAME + NUM_SLOTS <= NUM_NAMES, "more slots than there are barriers")
    k_ring = named_ring(q_tiles.dtype, N, MAIN, REST, NUM_SLOTS, NUM_CONSUMERS, NUM_CONSUMERS)
    v_ring = named_ring(q_tiles.dtype, N, MAIN, REST, NUM_SLOTS, V_NAME, NUM_CONSUMERS)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BOX], q_tiles.dtype)
    if APART:
        o_own = gl.allocate_shared_memory(q_tiles.dtype, [NUM_CONSUMERS, ROWS, BOX], layout)
    else:
        o_own = q_ring.tiles
    fence_async_shared()
    if NUM_CONSUMERS == 2:
        gl.warp_specialize([
            (_attend, (o_tiles, lse_ptr, tasks_ptr, row_length, num_heads, num_queries, num_keys, scale_log2, q_ring,
                       k_ring, v_ring, o_own, C0, CAUSAL, N, MAIN, REST, APART, NUM_CONSUMERS)),
            (_attend, (o_tiles, lse_ptr, tasks_ptr, row_length, num_heads, num_queries, num_keys, scale_log2, q_ring,
                       k_ring, v_ring, o_own, C1, CAUSAL, N, MAIN, REST, APART, NUM_CONSUMERS)),
            (_load, (q_tiles, k_tiles, v_tiles, k_rest_tiles, v_rest_tiles, tasks_ptr, row_length, num_heads, sharing,
                     num_keys, q_ring, k_ring, v_ring, CAUSAL, N, MAIN, REST, NUM_CONSUMERS)),
        ], [4, 1], [CONSUMER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (o_tiles, lse_ptr, tasks_ptr, row_length, num_heads, num_queries, num_keys, scale_log2, q_ring,
                       k_ring, v_ring, o_own, C0, CAUSAL, N, MAIN, REST, APART, NUM_CONSUMERS)),
            (_attend, (o_tiles, lse_ptr, tasks_ptr, row_length, num_heads, num_queries, num_keys, scale_log2, q_ring,
                       k_ring, v_ring, o_own, C1, CAUSAL, N, MAIN, REST, APART, NUM_CONSUMERS)),
            (_attend, (o_tiles, lse_ptr, tasks_ptr, row_length, num_heads, num_queries, num_keys, scale_log2, q_ring,
                       k_ring, v_ring, o_own, C2, CAUSAL, N, MAIN, REST, APART, NUM_CONSUMERS)),
            (_load, (q_tiles, k_tiles, v_tiles, k_rest_tiles, v_rest_tiles, tasks_ptr, row_length, num_heads, sharing,
                     num_keys, q_ring, k_ring, v_ring, CAUSAL, N, MAIN, REST, NUM_CONSUMERS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
