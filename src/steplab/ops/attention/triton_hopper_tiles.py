"""Shared parts of the Hopper kernels: tiles on their way through shared memory, and asynchronous products.

docs/attention_kernels.md explains Gluon, the loading warp and the consumers. A consumer starts the next product before
it takes the exponentials of the last (Shah et al. 2024, "FlashAttention-3", sections 3.1 and 3.2). Triton 3.8 renamed
Gluon's functions that copy tiles, and added one that adds a tile to memory; 3.9 removed the older names.

Note "one round": a product must end in the loop's round that starts it, else the assembler (ptxas of CUDA 13) waits
after every product. So the product with the weights of one round starts in the next.

Note "two parts": products are of the main columns of a head, and then of the rest, if there is one.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.language.core import _aggregate as aggregate


@builtin
def _add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
add_tile = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _add


@builtin
def reinterpret(x, dtype, shape, layout, _semantic=None):
    name = "reinterpret" if hasattr(shared_memory_descriptor, "reinterpret") else "_reinterpret"
    return getattr(x, name)(dtype, shape, layout, _semantic=_semantic)


ROWS = gl.constexpr(64)
"""Rows of a consumer's tile: as many as a product of one warp group has."""
NUM_CONSUMERS = gl.constexpr(2)
"""Number of consumers, the warp groups that multiply. For narrow heads and long sequences forward has three."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
"""Registers for each thread of a consumer, by the number of consumers; a multiprocessor has 65,536."""
LOADER_REGISTERS = 24
"""Registers for each thread of the loading warps, which hold only addresses."""


@aggregate
class Ring:
    """Slots in shared memory that the tiles of one tensor cycle through."""

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
        return self.tiles.index(i % self.num_slots)

    @gluon.jit
    def wait(self, i):
        mbarrier.wait(self.full.index(i % self.num_slots), (i // self.num_slots) & 1)
        return self.tiles.index(i % self.num_slots)

    @gluon.jit
    def release(self, i, pred=True):
        mbarrier.arrive(self.empty.index(i % self.num_slots), pred=pred)

    @gluon.jit
    def acquire(self, i, num_bytes):
        mbarrier.wait(self.empty.index(i % self.num_slots), ((i // self.num_slots) & 1) ^ 1)
        arrived = self.full.index(i % self.num_slots)
        mbarrier.expect(arrived, num_bytes)
        return arrived


@aggregate
class NamedRing:
    """A Ring of tiles in two parts, with named barriers for released slots: num_slots of them, from first_name on.

    An arrival at a named barrier costs a consumer one instruction. At a barrier in shared memory (an mbarrier, as in
    Ring) one thread arrives for all, and its four warps wait for each other first.
    """

    mains: gl.shared_memory_descriptor
    rests: gl.shared_memory_descriptor
    """Unused if tiles have no rest."""
    full: gl.shared_memory_descriptor
    num_slots: gl.constexpr
    first_name: gl.constexpr
    num_readers: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, mains, rests, full, num_slots, first_name, num_readers):
        self.mains = mains
        self.rests = rests
        self.full = full
        self.num_slots = gl.constexpr(num_slots)
        self.first_name = gl.constexpr(first_name)
        self.num_readers = gl.constexpr(num_readers)

    @gluon.jit
    def slot(self, i):
        """The slots of the i-th tile's two parts."""
        return self.mains.index(i % self.num_slots), self.rests.index(i % self.num_slots)

    @gluon.jit
    def wait(self, i):
        mbarrier.wait(self.full.index(i % self.num_slots), (i // self.num_slots) & 1)
        return self.slot(i)

    @gluon.jit
    def release(self, i):
        barrier_arrive(self.first_name + i % self.num_slots, 128 * self.num_readers + 32)

    @gluon.jit
    def acquire(self, i, num_bytes):
        if i >= self.num_slots:
            self.wait_released(i)
        arrived = self.full.index(i % self.num_slots)
        mbarrier.expect(arrived, num_bytes)
        return arrived

    @gluon.jit
    def wait_released(self, i):
        barrier_sync(self.first_name + i % self.num_slots, 128 * self.num_readers + 32)


@gluon.jit
def allocate_parts(dtype: gl.constexpr, num: gl.constexpr, rows: gl.constexpr, main: gl.constexpr, rest: gl.constexpr):
    main_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, main], dtype)
    mains = gl.allocate_shared_memory(dtype, [num, rows, main], main_layout)
    rests = mains
    if rest > 0:
        rest_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, rest], dtype)
        rests = gl.allocate_shared_memory(dtype, [num, rows, rest], rest_layout)
    return mains, rests


@gluon.jit
def load_parts(main_tiles, rest_tiles, b, head, row, arrived, parts, MAIN: gl.constexpr, REST: gl.constexpr):
    load_tile(main_tiles, [b, head, row, 0], arrived, parts[0])
    if REST > 0:
        load_tile(rest_tiles, [b, head, row, MAIN], arrived, parts[1])


@gluon.jit
def named_ring(
    dtype: gl.constexpr,
    rows: gl.constexpr,
    main: gl.constexpr,
    rest: gl.constexpr,
    num_slots: gl.constexpr,
    first_name: gl.constexpr,
    num_readers: gl.constexpr,
):
    """A ring for tiles [rows, main] and [rows, rest] that num_readers consumers release at named barriers."""
    mains, rests = allocate_parts(dtype, num_slots, rows, main, rest)
    full = gl.allocate_shared_memory(gl.int64, [num_slots, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num_slots):
        mbarrier.init(full.index(i), count=1)
    return NamedRing(mains, rests, full, num_slots, first_name, num_readers)


@gluon.jit
def ring(
    dtype: gl.constexpr,
    rows: gl.constexpr,
    box: gl.constexpr,
    num_slots: gl.constexpr,
    num_readers: gl.constexpr = NUM_CONSUMERS,
):
    """A ring for tiles [rows, box], each free again after num_readers consumers have released it."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, box], dtype)
    tiles = gl.allocate_shared_memory(dtype, [num_slots, rows, box], layout)
    full = gl.allocate_shared_memory(gl.int64, [num_slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [num_slots, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num_slots):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=num_readers)
    return Ring(tiles, full, empty, num_slots)


@gluon.jit
def new_mbarrier():
    made = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(made, count=1)
    return made


@gluon.jit
def in_parts(tile, MAIN: gl.constexpr, REST: gl.constexpr):
    rest = tile
    if REST > 0:
        rest = tile.slice(MAIN, REST, dim=1)
    return tile.slice(0, MAIN, dim=1), rest


@gluon.jit
def scores(a, b, layout: gl.constexpr, REST: gl.constexpr):
    """Start a b^T, both in two parts: a's [R, D] in shared memory or `in_registers`, b's [C, D] in shared memory."""
    C: gl.constexpr = b[0].shape[0]
    main, rest = a
    if main.dtype == gl.int32:
        A: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
        main, rest = unpack(main, b[0].dtype, A), unpack(rest, b[0].dtype, A)
    sums_RC = gl.zeros([ROWS, C], gl.float32, layout)
    sums_RC = warpgroup_mma(main, b[0].permute((1, 0)), sums_RC, use_acc=False, is_async=True)
    if REST > 0:
        sums_RC = warpgroup_mma(rest, b[1].permute((1, 0)), sums_RC, is_async=True)
    return sums_RC


@gluon.jit
def in_registers(tile_RD, C: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr):
    """A tile's parts in registers, packed as `scores` [R, C] reads them; without a rest, the main part twice. A product
    of 64 rows with both factors in shared memory would use most of its bandwidth."""
    main, rest = in_parts(tile_RD, MAIN, REST)
    held = _held(main, C)
    return held, _held(rest, C) if REST > 0 else held


@gluon.jit
def _held(x_RD, C: gl.constexpr):
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16]), 2)
    first, second = x_RD.load(A).reshape([ROWS, x_RD.shape[1] // 2, 2]).split()
    asm: gl.constexpr = "mov.b32 $0, {$1, $2};"
    return gl.inline_asm_elementwise(asm, "=r,h,h", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def times(a_RC, b, main_RD, rest_RD, REST: gl.constexpr):
    """Start sums + a b, the sums in two parts like the columns of b [C, D]."""
    main_RD = warpgroup_mma(a_RC, b[0], main_RD, is_async=True)
    if REST > 0:
        rest_RD = warpgroup_mma(a_RC, b[1], rest_RD, is_async=True)
    return main_RD, rest_RD


@gluon.jit
def store_parts(tile_RD, main_RD, rest_RD, MAIN: gl.constexpr, REST: gl.constexpr):
    """Put both parts into shared memory, visible to the copy engine."""
    main, rest = in_parts(tile_RD, MAIN, REST)
    main.store(main_RD.to(tile_RD.dtype))
    if REST > 0:
        rest.store(rest_RD.to(tile_RD.dtype))
    fence_async_shared()


# --- what Gluon lacks -----------------------------------------------------------------------------------------------


@gluon.jit
def pack(x_RC, dtype: gl.constexpr):
    """x rounded to 16 bits, two neighbours of a row in one int32: [R, C / 2]. Loops carry these, because the assembler
    would unpack and repack the registers of 16-bit numbers in every round."""
    first, second = x_RC.reshape([x_RC.shape[0], x_RC.shape[1] // 2, 2]).split()
    KIND: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    asm: gl.constexpr = "cvt.rn." + KIND + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """The unpacked result of `pack`, in a layout that leaves numbers in their threads: no instruction at all."""
    if dtype == gl.bfloat16:
        first, second = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        first, second = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    whole = gl.join(first, second).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(whole, layout, assert_trivial=True)


@gluon.jit
def where_before(x, position, end, otherwise):
    """x where position < end. LLVM would pack the comparisons of gl.where into words, and unpack them."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred before; setp.lt.s32 before, $2, $3; selp.f32 $0, $1, $4, before; }",
        "=f,f,r,r,f",
        [x, position, end, otherwise],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _instruction(text: gl.constexpr, operand):
    """An instruction for its effect: with an operand, and no result."""
    asm: gl.constexpr = text + " mov.b32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r", [operand], dtype=gl.int32, is_pure=False, pack=1)


FIRST_NAME = gl.constexpr(5)
"""Named barriers from here on are free: Triton has one for each of at most four roles, and one for all."""
NUM_NAMES = gl.constexpr(11)
"""Number of free barriers: a program has 16."""


@gluon.constexpr_function
def _at_barrier(what, num_threads):
    return f"bar.{what} $1, {num_threads};"


@gluon.jit
def barrier_sync(name, num_threads: gl.constexpr = 256):
    """Wait at a named barrier for another group of four warps, or for num_threads threads, the caller's included."""
    text: gl.constexpr = _at_barrier("sync", num_threads)
    _instruction(text, gl.to_tensor(FIRST_NAME + name))


@gluon.jit
def barrier_arrive(name, num_threads: gl.constexpr = 256):
    text: gl.constexpr = _at_barrier("arrive", num_threads)
    _instruction(text, gl.to_tensor(FIRST_NAME + name))
