"""Predicts the seconds of one kernel on a GPU: a roofline, times the shares of it that kernels reach.

A kernel with F FLOPs and M bytes takes about max(F / (a peak), M / (b bandwidth)) seconds and a few microseconds
(Williams, Waterman and Patterson 2009, "Roofline"), with the fitted shares a and b of `costs.rates`. plan and explain
use it.
"""

import math

import msgspec

from steplab.costs.flops import DTYPE_OF_MATMULS
from steplab.costs.operators import BACKWARD_FLOPS
from steplab.costs.rates import AttentionRates, Gpu, ProductRates
from steplab.ops.attention.hopper_kernels import planned_on
from steplab.specs.step_choices import FP8

_TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (256, 64), (128, 64), (64, 128), (64, 64))
"""Rows and columns of a matmul's result that one thread block computes, as in cuBLAS and CUTLASS."""
_SPLITS = (1, 2, 3, 4, 6, 8, 16)
"""Split-K factors: numbers of thread blocks that share one tile's inner dimension if there are few tiles."""
_SMOOTH = 5
"""Exponent p of (compute^p + memory^p)^(1/p), which replaces max(compute, memory). Near equality, compute and memory
hinder each other.
"""
_ALIGNED_BYTES = 16
"""Rows must begin at a multiple of this many bytes to be copied in one piece."""
_UNALIGNED = 6.0
"""Slowdown of a half-precision matmul with rows aligned to single elements. It is 5.4 to 7.4 in the record of a
vocabulary of 50,257, and less for pairs and fours.
"""
_HEAD_WIDTHS = (32, 64, 96, 128, 192, 256)
"""Head dimensions that torch's FlashAttention-2 is compiled for; other fused kernels are similar."""
USUAL_ATTENTION = {False: "sdpa_flash", True: "sdpa_efficient fp32"}
"""Attention implementation that lends its rates to one without rates. The key is True for fp32."""


class Product(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    m: int
    n: int
    k: int
    batch: int = 1
    transposed: bool = False
    """True if the first matrix is [k, m] in memory, as for a weight's gradient."""

    @property
    def row_lengths(self) -> tuple[int, int]:
        """Elements of a row in memory, of the first matrix and of the result.

        The second matrix's rows have one of these two lengths.
        """
        return self.m if self.transposed else self.k, self.n

    def padded(self, multiple: int) -> "Product":
        m, n, k = (-(-size // multiple) * multiple for size in (self.m, self.n, self.k))
        return msgspec.structs.replace(self, m=m, n=n, k=k)

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Matrix products of torch, with the index of the first factor among their inputs; the second follows it."""


def streaming_share(name: str, gpu: Gpu) -> float:
    shares = gpu.rates.streaming.shares
    base = name.removesuffix(" strided").removesuffix(" widening")
    return next(shares[known] for known in (name, base, "default") if known in shares)


def streaming_s(name: str, moved_bytes: float, gpu: Gpu) -> float:
    rates = gpu.rates.streaming
    gain = 1 + rates.cached_gain * math.exp(-moved_bytes / rates.cached_bytes)
    return rates.fixed_s + moved_bytes / (gpu.bandwidth_bytes_per_s * streaming_share(name, gpu) * gain)


def product_rates(dtype: str, gpu: Gpu) -> ProductRates:
    """Fitted rates of matmuls in this format; without a fit bf16's, because tensor cores work alike in all.

    TF32 takes fp32's share of the peak: 0.77 and 0.76 on an H200 at 8192.
    """
    known = gpu.rates.products
    if dtype == "tf32" and dtype not in known:
        return msgspec.structs.replace(known["bf16"], peak_share=known["fp32"].peak_share)
    return known.get(dtype) or known["fp32" if dtype == "fp32" else "bf16"]


def product_s(product: Product, dtype: str, gpu: Gpu) -> float:
    """Predict the seconds of a batched matmul.

    Multiprocessors process the result's tiles in waves. The fastest of the usual tiles is assumed, with split-K if that
    fills the last wave better.
    """
    rates, size = product_rates(dtype, gpu), {"fp32": 4, "tf32": 4, "fp8": 1}.get(dtype, 2)
    num_sms = gpu.multiprocessors
    per_sm = gpu.peaks[dtype] * rates.peak_share / (num_sms or 1)
    bandwidth = gpu.bandwidth_bytes_per_s * rates.bandwidth_share
    best = math.inf
    for rows, columns in _TILES:
        tiles = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)
        for split in _SPLITS if num_sms else (1,):
            if split > 1 and tiles * split > 4 * (num_sms or 1):
                break
            exact = tiles * split / (num_sms or 1)
            waves = exact if num_sms is None else _waves(exact, rates.partial_wave)
            compute = waves * 2 * rows * columns * (product.k / split + rates.ramp_k) / per_sm
            if split > 1:  # another kernel writes and reads the parts once more, in fp32
                parts_bytes = 2 * 4 * split * product.batch * product.m * product.n
                compute += parts_bytes / bandwidth + rates.fixed_s
            best = min(best, compute)
    if size == 2:
        aligned = min(math.gcd(each * size, _ALIGNED_BYTES) for each in product.row_lengths)
        best *= _UNALIGNED ** (math.log2(_ALIGNED_BYTES / aligned) / 3)
    m, n, k = product.m, product.n, product.k
    written = max(size, 2)  # fp8's result is bf16
    memory = product.batch * (size * (m * k + k * n) + written * m * n) / bandwidth
    return rates.fixed_s + float((best**_SMOOTH + memory**_SMOOTH) ** (1 / _SMOOTH))


def _waves(exact: float, partial_wave: float) -> float:
    return max(1.0, math.ceil(exact) * (1 - partial_wave) + exact * partial_wave)


def head_columns(width: int) -> int:
    """Head dimension as fused attention pads it: kernels are compiled for a few widths."""
    return next((known for known in _HEAD_WIDTHS if known >= width), width)


def rated_attention(name: str, dtype: str, gpu: str) -> str:
    if dtype == "fp32":
        return f"{name} fp32"
    return f"{name} portable" if name == "flash_triton" and not planned_on(gpu) else name


def attention_rates(name: str, dtype: str, gpu: Gpu) -> dict[str, AttentionRates]:
    """Fitted rates of an implementation by pass, or of `USUAL_ATTENTION` if it was not measured.

    In fp32, fused attention has other kernels, without tensor cores and with separate rates.
    """
    known = gpu.rates.attention
    own = rated_attention(name, dtype, gpu.name)
    return known[own if own in known else USUAL_ATTENTION[dtype == "fp32"]]


def attention_s(
    name: str, scores: Product, dtype: str, gpu: Gpu, *, backward: bool = False, causal: bool = True
) -> float:
    """Predict the seconds of one pass of fused attention; `scores` is the product of queries and keys.

    A causal mask leaves half of the scores, plus a share for the tiles that it cuts. Each score costs the padded head
    dimension for its products, and `softmax_width` for its exponential.
    """
    rates = attention_rates(name, dtype, gpu)["backward" if backward else "forward"]
    keys = min(scores.n, scores.n / 2 + rates.diagonal) if causal else scores.n
    flops_per_element = 4 * (BACKWARD_FLOPS if backward else 1)  # two products forward, five backward
    work = scores.batch * scores.m * keys * flops_per_element * (head_columns(scores.k) + rates.softmax_width)
    return rates.fixed_s + work / (gpu.peaks[dtype] * rates.peak_share)


def has_own_rates(precision: str, gpu: Gpu) -> bool:
    return gpu.is_fitted and precision not in FP8 and DTYPE_OF_MATMULS[precision] in gpu.rates.products
