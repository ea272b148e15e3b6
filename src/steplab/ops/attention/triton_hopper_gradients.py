"""The backward kernel for Hopper GPUs: its shared memory, and the steps of a consumer for dK, dV and dQ.

Consumers share dS through shared memory: each makes half of dQ's columns, or half of the rows of a tile of 128
queries. dK and dV come from a consumer's registers.

Shape suffixes: R rows (keys) of a consumer, M queries of a tile, N keys of both, D columns of the head dimension, W
columns of dQ that a consumer makes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from .triton_hopper_tiles import (
    ROWS,
    pack,
    reinterpret,
    times,
    unpack,
    where_before,
)

KEYS = gl.constexpr(128)
"""Keys of a program, and queries that share a counter of turns for their sums of dQ."""
PART = gl.constexpr(32)
"""Columns of dQ added to its sums at a time, for 64 queries: 8 KB in a row."""
PANEL = gl.constexpr(8)
"""Columns that are contiguous, as [64, 8]: 32 bytes a query.

A thread has two neighbouring columns of a query. Half a warp stores four queries and eight columns at a time: 128 bytes
in a row, each in its own bank. In the copy engine's swizzled rows of 128 bytes they would use half of the banks.
"""

# Named barriers of the two consumers. They begin at 1, because Triton reserves one more for the kernel's five roles. To
# TURN and DS the number of the waiting consumer is added.
BOTH_ARE_DONE = gl.constexpr(1)
TURN = gl.constexpr(2)
DS = gl.constexpr(4)


@aggregate
class SharedStorage:
    kv: gl.shared_memory_descriptor
    """Tiles of keys and values; at the end they hold dK and dV."""
    kv_arrived: gl.shared_memory_descriptor
    mains: gl.shared_memory_descriptor
    """Tiles of queries and of dO, in slots: the main columns."""
    rests: gl.shared_memory_descriptor
    """The rest of the columns of queries and dO; unused if there is no rest."""
    numbers: gl.shared_memory_descriptor
    """-log-sum-exp and -D of the queries, in two slots."""
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ds_parts: gl.shared_memory_descriptor
    """dS^T of two tiles, each of both consumers' keys."""
    ds_full: gl.shared_memory_descriptor
    """Barriers for ds_parts with tiles of 64 queries: one for each tile and consumer."""
    dq_0: gl.shared_memory_descriptor
    """The first consumer's dQ of a tile in parts of PART columns, before it is added to the sums."""
    dq_1: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    num_slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, kv, kv_arrived, mains, rests, numbers, full, empty, ds_parts, ds_full, dq_0, dq_1, dq_full,
                 dq_empty, num_slots):  # fmt: skip
        self.kv = kv
        self.kv_arrived = kv_arrived
        self.mains = mains
        self.rests = rests
        self.numbers = numbers
        self.full = full
        self.empty = empty
        self.ds_parts = ds_parts
        self.ds_full = ds_full
        self.dq_0 = dq_0
        self.dq_1 = dq_1
        self.dq_full = dq_full
        self.dq_empty = dq_empty
        self.num_slots = gl.constexpr(num_slots)

    @gluon.jit
    def wait(self, i):
        mbarrier.wait(self.full.index(i % self.num_slots), (i // self.num_slots) & 1)

    @gluon.jit
    def queries(self, i):
        place = 2 * (i % self.num_slots)
        return self.mains.index(place), self.rests.index(place)

    @gluon.jit
    def gradients(self, i):
        place = 2 * (i % self.num_slots) + 1
        return self.mains.index(place), self.rests.index(place)

    @gluon.jit
    def minus_lse(self, i):
        """-log-sum-exp of the i-th tile's queries, in powers of two."""
        return self.numbers.index(2 * (i % 2))

    @gluon.jit
    def minus_d(self, i):
        return self.numbers.index(2 * (i % 2) + 1)

    @gluon.jit
    def dq_of(self, CONSUMER: gl.constexpr):
        if CONSUMER == 0:
            own = self.dq_0
        else:
            own = self.dq_1
        return own

    @gluon.jit
    def ds_of(self, i, consumer):
        """The barrier of the consumer's dS of the i-th tile; for a negative i, any barrier."""
        return self.ds_full.index(2 * (gl.maximum(i, 0) % 2) + consumer)

    @gluon.jit
    def release(self, i):
        mbarrier.arrive(self.empty.index(i % self.num_slots))


@gluon.jit
def zero_at_run_time(i):
    """A zero that the compiler does not know. If it did, it would hoist shared-memory addresses out of the loop, for
    which no registers are left."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


# --- the products --------------------------------------------------------------------------------------------------


@gluon.jit
def own(smem, zero, WHICH: gl.constexpr, CONSUMER: gl.constexpr):
    return smem.kv.index(zero + WHICH).slice(CONSUMER * ROWS, ROWS, dim=0)


@gluon.jit
def weigh(i, s_RM, dp_RM, smem, problem, first_key, first_query, MASKED: gl.constexpr, CAUSAL: gl.constexpr, M:
          gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """Weights and dS of the i-th tile, packed. It waits for the product S, then for dP."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    OF_QUERIES: gl.constexpr = gl.SliceLayout(0, S)
    NUM_STARTED: gl.constexpr = 1 if REST == 0 else 2
    scale_log2, num_queries, num_keys = problem
    s_RM = warpgroup_mma_wait(NUM_STARTED, [s_RM])
    p_RM = gl.exp2(s_RM * scale_log2 + smem.minus_lse(i).load(OF_QUERIES)[None, :])
    if MASKED:
        keys = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        queries = first_query + gl.arange(0, M, OF_QUERIES)
        # Queries beyond the last are zeros, which a key of infinities turns into NaN.
        end = num_keys
        if CAUSAL:
            end = gl.minimum(queries + 1, num_keys)
        p_RM = where_before(p_RM, keys[:, None], gl.where(queries < num_queries, end, 0)[None, :], 0.0)
    dp_RM = warpgroup_mma_wait(0, [dp_RM])
    ds = pack(p_RM * (dp_RM + smem.minus_d(i).load(OF_QUERIES)[None, :]), smem.kv.dtype)
    return pack(p_RM, smem.kv.dtype), ds


@gluon.jit
def store_ds(i, ds, smem, M: gl.constexpr, CONSUMER: gl.constexpr):
    """Put dS where both consumers read it. The tensor cores read shared memory by another path than stores write it
    (PTX: the async proxy), so a fence must be between store and product, on either side of the barrier. The multiplying
    consumer fences after the barrier, so that the announcement need not wait."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    smem.ds_parts.index(i % 2).slice(CONSUMER * ROWS, ROWS, dim=0).store(unpack(ds, smem.kv.dtype, S))


@gluon.jit
def start_dv_dk(i, weights, ds, sums, smem, MAIN: gl.constexpr, REST: gl.constexpr):
    dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = sums
    P: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16]), 2)
    p_RM, ds_RM = unpack(weights, smem.kv.dtype, P), unpack(ds, smem.kv.dtype, P)
    dv_RD, dv_rest_RD = times(p_RM, smem.gradients(i), dv_RD, dv_rest_RD, REST)
    dk_RD, dk_rest_RD = times(ds_RM, smem.queries(i), dk_RD, dk_rest_RD, REST)
    return dk_RD, dk_rest_RD, dv_RD, dv_rest_RD


@gluon.jit
def wait_for_dv_dk(num_left: gl.constexpr, weights, ds, sums, REST: gl.constexpr):
    dk_RD, dk_rest_RD, dv_RD, dv_rest_RD = sums
    if REST > 0:
        dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, weights, ds = warpgroup_mma_wait(
            num_left, [dk_RD, dk_rest_RD, dv_RD, dv_rest_RD, weights, ds]
        )
    else:
        dk_RD, dv_RD, weights, ds = warpgroup_mma_wait(num_left, [dk_RD, dv_RD, weights, ds])
    return dk_RD, dk_rest_RD, dv_RD, dv_rest_RD


@gluon.jit
def start_dq(i, dq_MW, smem, zero, FIRST_KEY: gl.constexpr, NUM_KEYS: gl.constexpr, FIRST: gl.constexpr, W:
             gl.constexpr):  # fmt: skip
    """Start dQ = dS^T K over NUM_KEYS keys from FIRST_KEY on, added to dq_MW unless FIRST_KEY is 0. Of a tile of 64
    queries it makes the W columns from FIRST on; of a tile of 128, the 64 rows from FIRST on."""
    ds_NM = smem.ds_parts.index(gl.maximum(i, 0) % 2).slice(FIRST_KEY, NUM_KEYS, dim=0)
    k_ND = smem.kv.index(zero).slice(FIRST_KEY, NUM_KEYS, dim=0)
    if ds_NM.shape[1] > ROWS:
        ds_NM = ds_NM.slice(FIRST, ROWS, dim=1)
    else:
        k_ND = k_ND.slice(FIRST, W, dim=1)
    return warpgroup_mma(ds_NM.permute((1, 0)), k_ND, dq_MW, use_acc=FIRST_KEY > 0, is_async=True)


@gluon.constexpr_function
def _in_panels(width):
    """The layout of 64 rows of `width` columns as consecutive panels [64, PANEL]."""
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
def store_dq(i, dq_MW, smem, FIRST: gl.constexpr, W: gl.constexpr, CONSUMER: gl.constexpr):
    """Put dQ of the i-th tile where the copy engine reads it, once the earlier content has been added."""
    mbarrier.wait(smem.dq_empty.index(CONSUMER), (i & 1) ^ 1, pred=i > 0)
    own = smem.dq_of(CONSUMER)
    NUM_COLUMNS: gl.constexpr = own.shape[0] * PART
    layout: gl.constexpr = _in_panels(NUM_COLUMNS)
    reinterpret(own, gl.float32, [ROWS, NUM_COLUMNS], layout).slice(0, W, dim=1).store(dq_MW)


@gluon.jit
def commit_dq(i, smem, CONSUMER: gl.constexpr):
    """Announce dQ of the i-th tile to the adding warp; for a negative i, announce nothing."""
    fence_async_shared()
    mbarrier.arrive(smem.dq_full.index(CONSUMER), pred=i >= 0)
