"""What the Hopper kernels share: tiles on their way through shared memory, and products that do not wait.

These kernels are written in Gluon, Triton's lower level, where a program says which warps do what. One warp loads tiles
with the copy engine; two groups of four warps, the consumers, multiply them, each for 64 rows of its own. A consumer
gives the tensor cores the next product before it takes the exponentials of the last one, so that neither waits for the
other (Shah et al. 2024, "FlashAttention-3", sections 3.1 and 3.2).

Note "one round": products that were started run on while a consumer computes, and are waited for before the next round
of its loop. Across rounds the assembler (ptxas of CUDA 13) would wait after every one of them. What a round cannot
finish, the product with the weights that it has just made, the next round starts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(64)
"""Rows of a consumer, as many as a product of one group of warps has."""
NUM_CONSUMERS = gl.constexpr(2)
"""As many groups as have registers for their sums beside the loading warp."""
CONSUMER_REGISTERS = 240
"""Registers a thread of a consumer, of 65,536 in all."""
LOADER_REGISTERS = 24
"""Registers a thread of the loading warps: they hold addresses alone."""


@aggregate
class Ring:
    """Slots in shared memory through which the tiles of one tensor go, round and round."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    num_slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, num_slots):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.num_slots = gl.constexpr(num_slots)

    @gluon.jit
    def slot(self, i):
        """Where the i-th tile is."""
        return self.tiles.index(i % self.num_slots)

    @gluon.jit
    def take(self, i):
        """The i-th tile, once it has come."""
        mbarrier.wait(self.full.index(i % self.num_slots), (i // self.num_slots) & 1)
        return self.tiles.index(i % self.num_slots)

    @gluon.jit
    def release(self, i, pred=True):
        """A consumer has done with the i-th tile."""
        mbarrier.arrive(self.empty.index(i % self.num_slots), pred=pred)

    @gluon.jit
    def room(self, i, num_bytes):
        """The barrier that tells that the i-th tile has come, once there is room for its bytes."""
        mbarrier.wait(self.empty.index(i % self.num_slots), ((i // self.num_slots) & 1) ^ 1)
        arrived = self.full.index(i % self.num_slots)
        mbarrier.expect(arrived, num_bytes)
        return arrived


@gluon.jit
def ring(dtype: gl.constexpr, rows: gl.constexpr, box: gl.constexpr, num_slots: gl.constexpr):
    """A ring for tiles [rows, box]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, box], dtype)
    tiles = gl.allocate_shared_memory(dtype, [num_slots, rows, box], layout)
    full = gl.allocate_shared_memory(gl.int64, [num_slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [num_slots, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num_slots):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NUM_CONSUMERS)
    return Ring(tiles, full, empty, num_slots)


@gluon.jit
def own_tiles(dtype: gl.constexpr, box: gl.constexpr):
    """Room for one tile [ROWS, box] a consumer."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, box], dtype)
    return gl.allocate_shared_memory(dtype, [NUM_CONSUMERS, ROWS, box], layout)


@gluon.jit
def barrier():
    """A barrier that one arrival of bytes completes."""
    made = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(made, count=1)
    return made


@gluon.jit
def times_transposed(a_RD, b_CD, sums_RC, MAIN: gl.constexpr, REST: gl.constexpr):
    """Start sums + a b^T over the columns that hold something."""
    b_DC = b_CD.slice(0, MAIN, dim=1).permute((1, 0))
    sums_RC = warpgroup_mma(a_RD.slice(0, MAIN, dim=1), b_DC, sums_RC, is_async=True)
    if REST > 0:
        b_DC = b_CD.slice(MAIN, REST, dim=1).permute((1, 0))
        sums_RC = warpgroup_mma(a_RD.slice(MAIN, REST, dim=1), b_DC, sums_RC, is_async=True)
    return sums_RC


@gluon.jit
def times(a_RC, b_CD, main_RD, rest_RD, MAIN: gl.constexpr, REST: gl.constexpr):
    """Start sums + a b, the sums in two parts like the columns of b."""
    main_RD = warpgroup_mma(a_RC, b_CD.slice(0, MAIN, dim=1), main_RD, is_async=True)
    if REST > 0:
        rest_RD = warpgroup_mma(a_RC, b_CD.slice(MAIN, REST, dim=1), rest_RD, is_async=True)
    return main_RD, rest_RD


@gluon.jit
def put(tile_RD, main_RD, rest_RD, MAIN: gl.constexpr, REST: gl.constexpr):
    """Both parts into shared memory, where the copy engine will see them."""
    tile_RD.slice(0, MAIN, dim=1).store(main_RD.to(tile_RD.dtype))
    if REST > 0:
        tile_RD.slice(MAIN, REST, dim=1).store(rest_RD.to(tile_RD.dtype))
    fence_async_shared()
