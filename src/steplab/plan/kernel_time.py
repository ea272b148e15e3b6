"""How long one kernel takes on a GPU: the roofline, with what kernels reach of it.

A kernel that does F FLOPs and moves M bytes takes about max(F / (a peak), M / (b bandwidth)) seconds and a few
microseconds (Williams, Waterman and Patterson 2009, "Roofline"); a and b are the fitted shares of `plan.rates`.
"""

import math

from steplab.costs.flops import DTYPE_OF_MATMULS
from steplab.plan.dry_run.events import Operator, Product
from steplab.plan.fusion import Kernel
from steplab.plan.rates import Gpu, ProductRates

_TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (256, 64), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the result that one thread block makes, as in cuBLAS's and CUTLASS's kernels."""
_SPLITS = (1, 2, 3, 4, 6, 8, 16)
"""Parts of the inner dimension that different blocks sum, where there are few tiles."""
_SMOOTH = 5
"""Exponent of the sum in place of a maximum, near which compute and memory hinder each other."""
_ALIGNED_BYTES = 16
"""Rows that begin at no multiple of this cannot be copied in one piece."""
_UNALIGNED = 6.0
"""How many times longer a product in half precision takes then: 5.4 to 7.4 in the record of a vocabulary of 50,257."""


_HEAD_COLUMNS = 32
"""Columns of a head are padded to a multiple of this (flash-attention's kernels are built for 32, 64, 96, 128, ...)."""
_ONE_PASS = {"add_rms_norm": "fused reduction", "rotary_heads": "fused", "swiglu": "fused"}
"""Operators in one Triton kernel, and the kernels of a compiler's that are like it."""
USUAL_ATTENTION = "sdpa_flash"
"""Whose rates stand for those of an implementation that was not measured."""


def kernel_in_step_s(kernel: Kernel, gpu: Gpu, *, replayed: bool = False) -> float:
    """Seconds from the begin of a kernel to that of the next, within a step whose host is ahead; replayed: whether a
    CUDA graph launches them."""
    step, factor = gpu.rates.step, gpu.rates.step.product_factor
    if kernel.operator.kind == "streaming":
        factor = 1.0 if kernel.operator.phase == "optimizer" else step.streaming_factor  # of updates, steps were fitted
    return kernel_s(kernel, gpu) * factor + step.gap(replayed)


def kernel_s(kernel: Kernel, gpu: Gpu) -> float:
    """Seconds of a kernel."""
    op = kernel.operator
    if op.kind == "matmul" and op.product is not None:
        return product_s(op.product, op.dtype, gpu)
    if op.kind == "attention" and op.product is not None:
        return attention_s(op, gpu)
    return streaming_s(streaming_name(kernel), kernel.moved_bytes, gpu)


def streaming_name(kernel: Kernel) -> str:
    """By which name the rates have it."""
    if kernel.fused:
        return "fused sum of rows" if kernel.sums_rows else "fused reduction" if kernel.reduces else "fused"
    op = kernel.operator
    if like := _ONE_PASS.get(op.name.removesuffix("_backward")):
        return like
    if widens(op):
        return f"{op.name} widening"
    return f"{op.name} strided" if op.strided else op.name


def widens(op: Operator) -> bool:
    """Whether one of its inputs is in a format of half the width of its result: torch's kernels that convert while they
    compute reach half the bandwidth of others, such as those that add bf16 to a residual stream in fp32."""
    return op.name in ("add", "copy", "mul") and any(2 * each.num_bytes == op.written_bytes for each in op.reads)


def streaming_s(name: str, moved_bytes: float, gpu: Gpu) -> float:
    """Seconds of a kernel that memory bandwidth bounds."""
    rates = gpu.rates.streaming
    base = name.removesuffix(" strided").removesuffix(" widening")
    known = (each for each in (name, base, "default") if each in rates.shares)
    share = rates.shares[next(known)]
    gain = 1 + rates.cached_gain * math.exp(-moved_bytes / rates.cached_bytes)
    return rates.fixed_s + moved_bytes / (gpu.bandwidth_bytes_per_s * share * gain)


def product_rates(dtype: str, gpu: Gpu) -> ProductRates:
    """Rates of the number format, or where none was fitted, of bf16: tensor cores reach like shares in all their
    formats."""
    return gpu.rates.products.get(dtype) or gpu.rates.products["fp32" if dtype == "fp32" else "bf16"]


def product_s(product: Product, dtype: str, gpu: Gpu) -> float:
    """Seconds of a batched matrix product.

    Its result is cut into tiles, which the multiprocessors take in waves; the best of the usual tiles is taken to be
    chosen, and the inner dimension is split where that fills the last wave better.
    """
    rates, size = product_rates(dtype, gpu), _item_bytes(dtype)
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
            if split > 1:  # the parts are written and read once more, in fp32, by another kernel
                parts_bytes = 2 * 4 * split * product.batch * product.m * product.n
                compute += parts_bytes / bandwidth + rates.fixed_s
            best = min(best, compute)
    if size == 2 and any((each * size) % _ALIGNED_BYTES for each in product.row_lengths):
        best *= _UNALIGNED
    m, n, k = product.m, product.n, product.k
    memory = size * product.batch * (m * k + k * n + m * n) / bandwidth
    return rates.fixed_s + float((best**_SMOOTH + memory**_SMOOTH) ** (1 / _SMOOTH))


def _waves(exact: float, partial_wave: float) -> float:
    return max(1.0, math.ceil(exact) * (1 - partial_wave) + exact * partial_wave)


def attention_s(op: Operator, gpu: Gpu) -> float:
    """Seconds of fused attention.

    Queries times keys, with those of the tiles that the causal mask cuts; for each score the head's columns, padded as
    the kernels pad them, and as much again for its exponential.
    """
    product = op.product
    assert product is not None
    name, pass_name = op.name.removesuffix("_backward"), "backward" if op.name.endswith("_backward") else "forward"
    known = gpu.rates.attention
    rates = known[name if name in known else USUAL_ATTENTION][pass_name]
    scores = product.batch * product.m * (product.n / 2 + rates.diagonal)
    flops_per_score = op.flops / (product.batch * product.m * product.n / 2) / product.k
    columns = math.ceil(product.k / _HEAD_COLUMNS) * _HEAD_COLUMNS
    work = scores * flops_per_score * (columns + rates.softmax_width)
    return rates.fixed_s + work / (gpu.peaks[op.dtype] * rates.peak_share)


def _item_bytes(dtype: str) -> int:
    return 4 if dtype in ("fp32", "tf32") else 2


def has_own_rates(precision: str, gpu: Gpu) -> bool:
    """Whether products of a step's precision were measured on this GPU."""
    return gpu.is_fitted and DTYPE_OF_MATMULS[precision] in gpu.rates.products
