"""Fits kernel rates to stored records of one GPU: profiled steps and attention benchmarks.

Each group is fitted to its own evidence: products to profiled products, streaming operators to their sums by phase and
name, attention to benchmark cells. The search minimises the mean relative error, weighted by the root of the time, over
logarithms of positive figures, one coordinate at a time.
"""

import dataclasses
import functools
import gzip
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import msgspec
import numpy as np
from benchmarks.tables import RESULTS

from steplab.costs.kernel_time import Product, attention_s, product_s, rated_attention, streaming_s
from steplab.costs.rates import AttentionRates, Gpu, ProductRates, StreamingRates, with_rates
from steplab.plan.dry_run.events import Operator
from steplab.plan.dry_run.step import operators_of
from steplab.plan.fusion import Kernel, kernels_of
from steplab.plan.kernel_time import streaming_name, widens
from steplab.records.attention import AttentionRun
from steplab.records.profile import OpStats
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.records.timing import lead_s, waits_for_host
from steplab.specs.attention import AttentionSpec
from steplab.specs.step import StepSpec

_SHAPE = re.compile(r"\[([\d, ]+)\]")
_TOGETHER = {"copy": "copies", "masked_fill": "copies", "mul": "factors", "_softmax_backward_data": "factors"}
_TOGETHER |= {"nll_loss_backward": "fill", "zero": "fill", "_index_put_impl": "index_put"}
"""Operators with indistinguishable kernels in a trace: out-of-place masking copies first, the softmax's backward
multiplies first. Gradients of losses are filled with zeros first.
"""
_LARGEST_SHARE = 1.5
"""Largest fitted share of the bandwidth: the cache is faster than memory."""


Params = dict[str, float]
_FIRST_STEP, _LAST_STEP = 0.3, 0.004
"""Relative size of the search's first and last changes."""
STAY = 0.001
"""Error saving that justifies moving a figure by a factor of e from its start, so that figures without evidence stay,
such as throttling of steps at full clock.
"""


def search(error: Callable[[Params], float], start: Params) -> Params:
    """Positive figures with the least error near `start`: coordinate changes by shrinking factors."""
    best, least, step = dict(start), error(start), _FIRST_STEP
    while step > _LAST_STEP:
        improved = False
        for name in start:
            for factor in (math.exp(step), math.exp(-step)):
                tried = best | {name: best[name] * factor}
                if (found := error(tried)) < least - 1e-9:
                    best, least, improved = tried, found, True
        if not improved:
            step /= 2
    return best


def relative_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Mean of |ln(predicted / measured)|, weighted by the root of the measured time."""
    total = weights = 0.0
    for predicted, measured in pairs:
        weight = math.sqrt(measured)
        total += weight * abs(math.log(predicted / measured))
        weights += weight
    return total / weights


# --- products -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class ProductTime:
    product: Product
    dtype: str
    seconds: float


def product_times(runs: Sequence[Run]) -> list[ProductTime]:
    """Matrix products of eager profiled steps: each operator's mean by shape and place in the model.

    Compiled steps are excluded: they run near the power limit at a lower clock, which is fitted to whole steps.
    """
    found = []
    for run in runs:
        if run.profile is None or run.spec is None or run.spec.compile != "off":
            continue
        tf32 = run.spec.precision == "tf32"
        for op in run.profile.ops:
            product = _product(op.name, op.inputs)
            if product is not None and op.calls and op.device_s > 0:
                dtype = "tf32" if tf32 and op.dtype == "fp32" else op.dtype
                found.append(ProductTime(product, dtype, op.device_s / op.calls))
    return found


def _product(name: str, inputs: str) -> Product | None:
    shapes = [tuple(int(size) for size in shape.split(",")) for shape in _SHAPE.findall(inputs)[:2]]
    if len(shapes) < 2 or name not in ("aten::mm", "aten::bmm"):
        return None
    (*batch, m, k), n = shapes[0], shapes[1][-1]
    return Product(m=m, n=n, k=k, batch=batch[0] if batch else 1)


def fit_products(times: Sequence[ProductTime], dtype: str, gpu: Gpu) -> ProductRates:
    own = [time for time in times if time.dtype == dtype and not any(x % 8 for x in (time.product.n, time.product.k))]
    shapes = {time.product for time in own}

    def error(params: Params) -> float:
        if params["partial_wave"] > 1 or params["peak_share"] > 1 or params["bandwidth_share"] > 2:
            return math.inf
        trial = with_rates(gpu, products=gpu.rates.products | {dtype: msgspec.convert(params, ProductRates)})
        predicted = {product: product_s(product, dtype, trial) for product in shapes}
        return relative_error((predicted[time.product], time.seconds) for time in own)

    start = {"fixed_s": 2e-6, "peak_share": 0.8, "ramp_k": 100.0, "bandwidth_share": 0.8, "partial_wave": 0.4}
    return msgspec.convert(search(error, start), ProductRates)


def fit_fp8(gpu: Gpu) -> Gpu:
    """The GPU with fp8's share of the peak, bf16's other figures, and its casts' shares of the bandwidth, by layers
    alone (benchmarks.kernels fp8_products): few large ones show no more. Unchanged for another GPU than theirs."""
    measured = json.loads(gzip.decompress((RESULTS / "fp8_products_h200_202611.json.gz").read_bytes()))
    if measured["device"] not in gpu.device_names:
        return gpu
    times, streaming, products = list[ProductTime](), gpu.rates.streaming, gpu.rates.products
    shares: dict[str, list[float]] = defaultdict(list)
    for row in measured["rows"]:
        sizes, _, what = row["name"].partition(" ")
        tokens, width, out = map(int, sizes.split("x"))
        seconds = median(row["samples_s"])
        if what in ("fp8 fast y", "fp8 exact dx", "fp8 exact dw"):  # as Fp8Linear runs
            m, n, k = {"y": (tokens, out, width), "dx": (tokens, width, out)}.get(
                what[-2:].strip(), (out, width, tokens)
            )
            times.append(ProductTime(Product(m=m, n=n, k=k), "fp8", seconds))
        elif what in ("cast amax", "cast both"):
            name = "fp8_amax" if what == "cast amax" else "fp8_cast_both"
            shares[name].append(row["amount"] / (seconds - streaming.fixed_s) / gpu.bandwidth_bytes_per_s)

    def at(share: float) -> Gpu:
        fp8 = msgspec.structs.replace(products["bf16"], peak_share=share)
        return with_rates(gpu, products=products | {"fp8": fp8})

    def error(params: Params) -> float:
        trial = at(params["peak_share"])
        return relative_error((product_s(time.product, "fp8", trial), time.seconds) for time in times)

    fitted = streaming.shares | {name: median(found) for name, found in shares.items()}
    found = at(search(error, {"peak_share": 0.7})["peak_share"])
    return with_rates(found, streaming=msgspec.structs.replace(streaming, shares=fitted))


# --- streaming operators ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSum:
    """Memory-bound kernels that a record sums, such as an operator's in a phase."""

    kernels: Counter[tuple[str, int]]
    """Number of kernels by rate name and bytes moved."""
    seconds: float


def streaming_sums(runs: Sequence[Run]) -> list[KernelSum]:
    """Sums from eager profiles, single-kernel optimizers, and compilers' kernels."""
    return [*eager_sums(runs), *_optimizer_sums(runs), *_fused_sums(runs)]


def fit_streaming(sums: Sequence[KernelSum], gpu: Gpu, known: StreamingRates | None = None) -> StreamingRates:
    """Shares of the bandwidth by name, and common figures; with `known`, only its missing names."""
    names = sorted({name for each in sums for name, _ in each.kernels})
    entries = [(index, *kernel, number) for index, each in enumerate(sums) for kernel, number in each.kernels.items()]
    sizes = sorted({moved_bytes for _, _, moved_bytes, _ in entries})
    of_name, of_size = ({each: number for number, each in enumerate(those)} for those in (names, sizes))
    places = np.array([of_name[name] * len(sums) + index for index, name, _, _ in entries])
    size_of = np.array([of_size[moved_bytes] for _, _, moved_bytes, _ in entries])
    numbers = np.array([float(number) for *_, number in entries])
    counts = np.bincount(places % len(sums), numbers, len(sums))
    measured = np.array([each.seconds for each in sums])
    weights = np.sqrt(measured) / np.sqrt(measured).sum()

    @functools.lru_cache(maxsize=8)
    def at_full_bandwidth(cached_gain: float, cached_bytes: float) -> Any:
        """Seconds by name and sum at the stated bandwidth, without fixed times: in these a share is a factor."""
        rates = StreamingRates(fixed_s=0.0, cached_gain=cached_gain, cached_bytes=cached_bytes, shares={"default": 1.0})
        trial = with_rates(gpu, streaming=rates)
        seconds = np.array([streaming_s("default", moved_bytes, trial) for moved_bytes in sizes])
        return np.bincount(places, numbers * seconds[size_of], len(names) * len(sums)).reshape(len(names), -1)

    fixed = {} if known is None else {**{name: getattr(known, name) for name in _COMMON}, **known.shares}

    def error(params: Params) -> float:
        if any(params[name] > _LARGEST_SHARE for name in names if name in params):
            return math.inf
        params = fixed | params
        shares = np.array([params[name] for name in names])[:, None]
        moving_s = (at_full_bandwidth(params["cached_gain"], params["cached_bytes"]) / shares).sum(axis=0)
        away = sum(abs(math.log(params[name] / start[name])) for name in _COMMON if name in start)
        return float((weights * abs(np.log((counts * params["fixed_s"] + moving_s) / measured))).sum()) + STAY * away

    start = {name: v for name, v in (_COMMON | dict.fromkeys(names, 0.7)).items() if name not in fixed}
    found = search(error, start)
    if known is not None:
        return msgspec.structs.replace(known, shares=known.shares | found)
    shares = {name: found[name] for name in names}
    shares["default"] = median(shares.values())
    return msgspec.convert({name: found[name] for name in _COMMON} | {"shares": shares}, StreamingRates)


_COMMON = {"fixed_s": 2e-6, "cached_gain": 0.3, "cached_bytes": 3e7}
"""Figures common to all kernels, and their starting values."""


def eager_sums(
    runs: Sequence[Run], operators_of: Callable[[StepSpec], Iterable[Operator]] = operators_of
) -> list[KernelSum]:
    """Sums of eager profiles; `operators_of` gives a step's operators."""
    found = []
    for run in runs:
        if run.profile is None or run.spec is None or run.spec.compile != "off":
            continue
        measured: dict[tuple[str, str], float] = defaultdict(float)
        for op in run.profile.ops:
            stem = op.name.removeprefix("aten::")
            stem = stem if stem.startswith("_fused_adam") else stem.removesuffix("_")
            measured[op.phase, _told_apart(stem, _direction(op))] += op.device_s / run.profile.num_steps
        kernels: dict[tuple[str, str], Counter[tuple[str, int]]] = defaultdict(Counter)
        for kernel in kernels_of(operators_of(run.spec), compiled=False):
            each = kernel.operator
            if each.kind == "streaming":
                narrows = each.name == "copy" and each.written_bytes < each.read_bytes
                key = each.phase, _told_apart(each.name, "widening" if widens(each) else "narrowing" if narrows else "")
                kernels[key][streaming_name(kernel), kernel.moved_bytes] += 1
        found += [KernelSum(kernels[key], measured[key]) for key in kernels if measured.get(key)]
    return found


def _told_apart(stem: str, direction: str) -> str:
    return f"{stem} {direction}" if direction else _TOGETHER.get(stem, stem)


def _direction(op: OpStats) -> str:
    """Direction of an operator's result against its inputs' formats; inputs are in order, an overwritten one first."""
    stem = op.name.removeprefix("aten::")
    formats = _FORMAT.findall(op.inputs)[:2]
    if stem not in ("add", "add_", "copy_", "mul", "mul_") or sorted(formats) not in _WIDE_AND_NARROW:
        return ""
    if formats[0] == "fp32" or not stem.endswith("_"):
        return "widening"
    return "narrowing" if stem == "copy_" else ""


_FORMAT = re.compile(r"(\w+)\[")
_WIDE_AND_NARROW = (["bf16", "fp32"], ["fp16", "fp32"])


def _optimizer_sums(runs: Sequence[Run]) -> list[KernelSum]:
    """Single-kernel optimizers by phase length with the host ahead: medians by model, precision and optimizer. They
    cover optimizers without eager profiles, such as steplab's.
    """
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    specs: dict[tuple[str, str, str], StepSpec] = {}
    for run in runs:
        if run.spec is None or run.timing is None or run.spec.optimizer not in _IN_ONE_KERNEL:
            continue
        samples = run.timing.phase("optimizer")
        phases = run.timing.back_to_back
        if samples is None or lead_s(phases, "optimizer") is None or waits_for_host(phases, "optimizer"):
            continue
        key = run.spec.model.label, str(run.spec.precision), str(run.spec.optimizer)
        times[key].append(median(samples.best_s))
        specs.setdefault(key, run.spec)
    found = []
    for key, spec in specs.items():
        operators = [op for op in operators_of(spec) if op.phase == "optimizer"]
        counted = Counter((op.name, op.moved_bytes) for op in operators if op.kind == "streaming")
        if counted.total() == 1:
            found.append(KernelSum(counted, median(times[key])))
    return found


_IN_ONE_KERNEL = ("adamw_fused", "adamw_triton")


def _fused_sums(runs: Sequence[Run]) -> list[KernelSum]:
    found = []
    for run in runs:
        if run.profile is None or run.spec is None or run.spec.compile == "off":
            continue
        operators = operators_of(dataclasses.replace(run.spec, compile="off"))
        kernels = kernels_of(operators, compiled=True, blocks_alone=run.spec.compile == "block")
        timed = [op for op in run.profile.ops if op.name.startswith("triton_")]
        for kind in product(("forward", "backward"), ("pointwise", "reduction", "softmax")):
            own = [k for k in kernels if k.fused and kind == (k.operator.phase, _kind_of(k))]
            measured = sum(op.device_s for op in timed if kind == (op.phase, _kind_of_timed(op)))
            if own and measured:
                counted = Counter((streaming_name(kernel), kernel.moved_bytes) for kernel in own)
                found.append(KernelSum(counted, measured / run.profile.num_steps))
    return found


def _kind_of(kernel: Kernel) -> str:
    return "softmax" if kernel.exponentials else "reduction" if kernel.reduces else "pointwise"


def _kind_of_timed(op: OpStats) -> str:
    if op.name.startswith("triton_poi_"):
        return "pointwise"
    return "softmax" if "log_softmax_" in op.name and op.phase == "forward" else "reduction"


# --- attention ----------------------------------------------------------------------------------------------------


def fit_attention(records: Sequence[Record], gpu: Gpu) -> dict[str, dict[str, AttentionRates]]:
    """Rates by implementation and pass, from causal cells in bf16 and fp32 on a busy GPU; among equal cells the newest
    counts, because kernels change.

    The smallest takes at most the shortest cell of any implementation, since most were measured only on large ones.
    """
    times: dict[tuple[str, str, str], dict[AttentionSpec, tuple[Product, float]]] = defaultdict(dict)
    shortest_s: dict[str, float] = {}
    for record in sorted(records, key=lambda record: record.created_utc):
        if not isinstance(record, AttentionRun):
            continue
        for cell in record.cells:
            spec = cell.spec
            usual = spec.causal and spec.dtype in _RATED and spec.heads == spec.num_kv_heads
            if cell.failure or not usual or spec.queries != spec.num_keys or spec.implementation == "plain":
                continue
            name = spec.implementation
            if name == "sdpa":  # torch's choice is constant only in fp32
                name = "sdpa_efficient" if spec.dtype == "fp32" else ""
            env = record.environment
            if name == "flash_triton" and spec.dtype != "fp32" and env and env.flash_triton == "portable":
                name = "flash_triton portable"
            batch = spec.batch * spec.heads
            for timed in cell.passes:
                if not timed.device_s:
                    continue
                taken_s = median(timed.device_s)
                shortest_s[timed.phase] = min(taken_s, shortest_s.get(timed.phase, taken_s))
                is_busy = batch * spec.queries >= _BUSY_ROWS and spec.dim >= _LEAST_WIDTH
                if is_busy and name and timed.phase in ("forward", "backward"):
                    scores = Product(m=spec.queries, n=spec.queries, k=spec.dim, batch=batch)
                    times[name, spec.dtype, timed.phase][spec] = scores, taken_s
    found: dict[str, dict[str, AttentionRates]] = {}
    for (name, dtype, phase), own in times.items():
        if len(own) >= _LEAST_CELLS:
            rated = found.setdefault(rated_attention(name, dtype, gpu.name), {})
            rated[phase] = _fit_attention(list(own.values()), gpu, name, dtype, phase, shortest_s[phase])
    return {name: rates for name, rates in found.items() if len(rates) == 2}


_RATED = ("bf16", "fp32")
_BUSY_ROWS = 65536
"""Rows of scores over all heads that give every multiprocessor several tiles of 128."""
_LEAST_WIDTH = 64
_LEAST_CELLS = 2
"""Few cells give the share of the peak and the softmax's width; other figures keep their starting values."""


def _fit_attention(
    times: Sequence[tuple[Product, float]], gpu: Gpu, name: str, dtype: str, phase: str, shortest_s: float
) -> AttentionRates:
    def error(params: Params, start: Params) -> float:
        if params["peak_share"] > 1 or params["fixed_s"] > shortest_s:
            return math.inf
        rates = {rated_attention(name, dtype, gpu.name): {phase: msgspec.convert(params, AttentionRates)}}
        trial, backward = with_rates(gpu, attention=rates), phase == "backward"
        away = sum(abs(math.log(params[figure] / start[figure])) for figure in start)
        causal = name != MASKED
        predicted = (
            (attention_s(name, each, dtype, trial, backward=backward, causal=causal), seconds)
            for each, seconds in times
        )
        return relative_error(predicted) + STAY * away

    starts = [
        {"fixed_s": shortest_s / 2, "peak_share": share, "softmax_width": width, "diagonal": 64.0}
        for share in _SHARES_TRIED
        for width in _WIDTHS_TRIED
    ]
    found = [(search(partial(error, start=start), start), start) for start in starts]
    return msgspec.convert(min(found, key=lambda each: error(*each))[0], AttentionRates)


_SHARES_TRIED, _WIDTHS_TRIED = (0.4, 0.65, 0.9), (15.0, 60.0)
"""Starting points: share of the peak and softmax width compensate each other, so one search may stop early."""


# --- traced models ------------------------------------------------------------------------------------------------

TRACED = re.compile(
    r"elementwise|sum|zeros|native_|added rows|.* (long|half)$|(_local_scalar_dense|all|arange|cumsum|floor_divide)$|"
    r"(histc|scatter|sort|topk)$"
)
"""Rate names that only other libraries' models show."""
MASKED = "sdpa_cudnn masked"


def fit_traced(runs: Sequence[Run], operators_of: Callable[[StepSpec], Iterable[Operator]], gpu: Gpu) -> Gpu:
    """The GPU with rates of traced models' kernels, from their profiles: operators that steplab's own model lacks, in
    eager ones, and attention with a mask."""
    shares = {name: share for name, share in gpu.rates.streaming.shares.items() if not TRACED.match(name)}
    own = msgspec.structs.replace(gpu.rates.streaming, shares=shares)
    found = with_rates(gpu, streaming=fit_streaming(eager_sums(runs, operators_of), gpu, own))
    masked = dict[str, AttentionRates]()
    for phase, name, place in (("forward", "forward", 3), ("backward", "backward", 6)):
        times = [
            (Product(m=tokens, n=tokens, k=width, batch=batch * heads), op.device_s / op.calls)
            for run in runs
            if run.profile and run.spec and not any(op.dropout for op in operators_of(run.spec))
            for op in run.profile.ops
            if op.name == f"aten::_cudnn_attention_{name}" and _is_masked(op, place)
            for batch, heads, tokens, width in [tuple(map(int, _SHAPE.findall(op.inputs)[0].split(",")))]
        ]
        if len(times) >= _LEAST_CELLS:
            shortest_s = 2 * gpu.rates.attention["sdpa_cudnn"][phase].fixed_s
            masked[phase] = _fit_attention(times, gpu, MASKED, "bf16", phase, shortest_s)
    return with_rates(found, attention=gpu.rates.attention | ({MASKED: masked} if len(masked) == 2 else {}))


def _is_masked(op: OpStats, place: int) -> bool:
    """True if the tensor at this place is as wide as long: one number for each score."""
    sizes = [shape.split(",") for shape in _SHAPE.findall(op.inputs)]
    return len(sizes) > place and sizes[place][-1] == sizes[place][-2]
