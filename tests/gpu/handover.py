from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _store(x_ptr, number, PLACE: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    zeros = gl.where(gl.arange(0, 32 * WARPS, layout) < 0, 1, 0)
    gl.store(x_ptr + PLACE, number + gl.sum(zeros, 0))


@gluon.jit
def handover_kernel(x_ptr, number):
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    FOUR: gl.constexpr = 4
    ONE: gl.constexpr = 1
    gl.warp_specialize([
        (_store, (x_ptr, number, FIRST, FOUR)),
        (_store, (x_ptr, number, SECOND, FOUR)),
        (_store, (x_ptr, number, THIRD, ONE)),
    ], [4, 1], [240, 24])  # fmt: skip
