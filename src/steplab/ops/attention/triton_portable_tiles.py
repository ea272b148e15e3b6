"""What the portable kernels share."""

import triton
import triton.language as tl


@triton.jit
def operand(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Sums as a product takes them: in the type of the tensors, and for TF32 rounded to its 10 bits.

    The matrix units would cut the other 13 off, which errs twice as much and always to the same side.
    """
    if PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # a NaN's bits may overflow
    return x.to(dtype)


@triton.jit
def plus_product(sums, a, b, PRECISION: tl.constexpr):
    """sums + a b, with a as `operand` gives it.

    Where products are exact to float32, each tile's is summed by itself and then added, as cuBLAS adds parts: one
    running sum over thousands of terms errs several times as much. Written as `sums + product`, the compiler would make
    the running sum of it. TF32's products err a thousand times more than either sum.
    """
    if PRECISION == "ieee" and a.dtype == tl.float32:
        return sums - tl.dot(-a, b, input_precision=PRECISION)
    return tl.dot(a, b, sums, input_precision=PRECISION)
