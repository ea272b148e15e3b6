"""A Gluon kernel in which groups of warps store the number that they were handed, and nothing else happens.

The groups are as many and as large as those of the Hopper kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _store(x_ptr, number, PLACE: gl.constexpr):
    gl.store(x_ptr + PLACE, number)


@gluon.jit
def handover_kernel(x_ptr, number):
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    gl.warp_specialize([
        (_store, (x_ptr, number, FIRST)),
        (_store, (x_ptr, number, SECOND)),
        (_store, (x_ptr, number, THIRD)),
    ], [4, 1], [240, 24])  # fmt: skip
