"""Programs that add to the same memory in turns: counters that say whose turn it is."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _now(turn_ptr):
    """Whose turn it is; what was added before is seen after."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [turn_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for(turn, turn_ptr):
    """Until it is this turn, or was: where several warps wait, one may have ended its turn before another looks."""
    now = _now(turn_ptr)
    while now < turn:
        now = _now(turn_ptr)
    # The copy engine's additions come after what has been read. For shared memory too, the fence would be one of all
    # memory of the GPU, and take as long as a way there and back.
    asm: gl.constexpr = "fence.proxy.async.global; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,r", [now], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def written():
    """Until all that this warp gave the copy engine is in memory. (tma.store_wait: until it has been read.)"""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync -1; mov.b32 $0, 0;",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def hand_on(turn_ptr):
    """It is the next one's turn; by one thread of each warp, for what the warp has written."""
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
