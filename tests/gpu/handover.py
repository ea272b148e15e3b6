"""A Gluon kernel in which two groups of warps store the number that they were handed, and nothing else happens."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _store_first(x_ptr, number):
    gl.store(x_ptr, number)


@gluon.jit
def _store_second(x_ptr, number):
    gl.store(x_ptr + 1, number)


@gluon.jit
def handover_kernel(x_ptr, number):
    gl.warp_specialize([(_store_first, (x_ptr, number)), (_store_second, (x_ptr, number))], [4], [24])
