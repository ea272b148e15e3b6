"""Published measurements of others against steplab's predictions: step times, and memory of ranks.

    python -m benchmarks.published > table.md            (from the root of the checkout)
    python -m benchmarks.published memory > table.md

Rows come from benchmarks/public_training.json.xz. If ranks split the model, a row becomes a step on a layout
(plan.layout.time). Otherwise each rank has the whole model, and the row becomes one rank's step: its model, its batch,
and weights in bf16. The update is divided by the ranks that share its state; the loss is in fp32.

A few factors per source and GPU describe its software, attention and network (StackRates). With enough rows of a source
on a GPU, they are fitted to rows with other model sizes, or with one model, other numbers of GPUs. Other rows use
kernel rates alone, and a first table all rows.

Other programs keep other state: 16-bit weights with partly shared fp32 copies, or fp32 shards of weights used in 16
bits. They pad the vocabulary for tp, and before 2022 did not split tokens between tensor-parallel products. Memory of
ranks uses their state; all else is predicted as steplab would run it.
"""

import dataclasses
import itertools
import lzma
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
from benchmarks.rates_of_kernels import STAY, Params, search

from steplab.costs.flops import DTYPE_OF_MATMULS
from steplab.costs.rates import Gpu, gpu_of
from steplab.errors import SteplabError, Unsupported, UserError
from steplab.plan.cards import outside_bytes
from steplab.plan.layout.links import machine_of
from steplab.plan.layout.memory import memory_by_rank
from steplab.plan.layout.model import own_model
from steplab.plan.layout.ranks import rank_groups
from steplab.plan.layout.sharing import sharing_of
from steplab.plan.layout.time import LayoutClock
from steplab.plan.layout.traffic import updated_elements
from steplab.plan.memory import workspace_of
from steplab.plan.time import parts_of, refuse_unknown_step, throttled
from steplab.records.layout_plan import LayoutTime
from steplab.records.prediction import RankMemory
from steplab.records.step_time import TimePart
from steplab.specs.hardware import hardware_named
from steplab.specs.layout import SINGLE, Layout
from steplab.specs.model import ModelSpec, TransformerShape
from steplab.specs.step import StepSpec
from steplab.stats import percentile
from steplab.units import GIB

TABLE = Path(__file__).parent / "public_training.json.xz"
_NAME = "medium"
"""Base size of a published model, with all sizes changed."""
_LOSS_BYTES = 24
"""Extra bytes per logit of a loss in fp32 over bf16: copy, log_softmax, their gradients and nll_loss's, 36 against
12.
"""
_ONE_NODE = 8
_ASSUMED_GPU = {"A100 (unstated kind)": "A100 SXM 80GB"}
"""GPUs of unstated kind -> the assumed one."""
_NETWORKS = {
    "800 Gb/s a node": 12.5e9,
    "4 x Omni-Path 100 a node": 6.25e9,
    "HDR InfiniBand": 25e9,
    "EFA (AWS p5)": 50e9,
}
"""Parts of a source's words for its network -> stated bytes/s of each of eight GPUs: its share of the node's, 200
Gbit/s per GPU of Selene, 3200 per p5 node.
"""
_BY_DTENSOR = ("KempnerForge", "torchtitan")
"""Programs with torch's DTensor, which costs Python time; Megatron's and nanotron's layers do not."""
PADDED_VOCABULARY = 128
"""Megatron-LM pads the vocabulary to a multiple of this times its tensor-parallel ranks
(--make-vocab-size-divisible-by).
"""
_ACTIVATIONS = {"gelu": "gelu", "relu": "gelu", "silu": "swiglu", "swiglu": "swiglu"}
"""relu costs as much as gelu: both are bound by bandwidth."""
_PASSES = {"step": "train", "forward (no grad)": "forward", "forward+backward": "forward_backward"}


class PublicModel(msgspec.Struct, frozen=True):
    key: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    ffn_matrices: int | None = None
    activation: str | None = None
    vocab: int | None = None
    positions: str | None = None
    norm: str | None = None
    bias: bool | None = None
    tied: bool | None = None


class PublicLayout(msgspec.Struct, frozen=True):
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    shard: str | None = None
    shard_ranks: int | None = None
    dp: int | None = None


class PublicRow(msgspec.Struct, frozen=True):
    id: str
    group: str
    gpu: str
    framework: str
    gpus: int | None
    gpus_per_node: int | None
    network: str | None
    global_batch: int | None
    seq: int | None
    micro_batch: int | None
    grad_accum: int | None
    passes: str | None
    time_grade: str
    scored: bool
    scope: str | None
    model: PublicModel
    layout: PublicLayout
    precision: dict[str, Any]
    measured: dict[str, Any]
    steplab_gpu: str | None = None
    recompute: str | None = None
    compile: Any = None
    attention: str | None = None
    derived: dict[str, Any] | None = None

    @property
    def card(self) -> str | None:
        """Name of its GPU in hardware.toml; None if absent."""
        return self.steplab_gpu or _ASSUMED_GPU.get(self.gpu)

    @property
    def is_split(self) -> bool:
        return (self.layout.tp or 1) > 1 or (self.layout.pp or 1) > 1

    @property
    def job(self) -> str:
        """Common part of a job's rows, across layouts and micro-batches."""
        model = (self.model.key, self.model.layers, self.model.hidden, self.seq, self.recompute, self.passes)
        return f"{self.group} {model} {self.gpus}×{self.gpu} {self.global_batch}"

    @property
    def measured_s(self) -> float | None:
        found = (self.derived or {}).get("step_time_s") or self.measured.get("step_time_s")
        return float(found) if found else None

    @property
    def num_parameters(self) -> float:
        """Approximate matrix parameters: 12 L d² for the usual block, and the vocabulary."""
        m = self.model
        layer = (2 + 2 * (m.kv_heads or m.heads or 1) / (m.heads or 1)) * (m.hidden or 0) ** 2
        layer += (m.ffn_matrices or 2) * (m.hidden or 0) * (m.ffn or 0)
        return (m.layers or 0) * layer + (1 if m.tied else 2) * (m.vocab or 0) * (m.hidden or 0)


def read_rows(path: Path = TABLE) -> list[PublicRow]:
    return msgspec.convert(msgspec.json.decode(lzma.decompress(path.read_bytes()))["rows"], list[PublicRow])


def step_of(row: PublicRow) -> StepSpec:
    """The step of one rank. Raises Unsupported with the reason."""
    what, model, layout = f"predicting {row.id}", row.model, row.layout
    if row.card is None:
        raise Unsupported(what, f"the GPU is unknown: {row.gpu}", "")
    if (layout.cp or 1) > 1:
        raise Unsupported(what, f"ranks split sequences: cp={layout.cp}", "")
    if row.scope != "dense decoder":
        raise Unsupported(what, f"not a dense decoder: {row.scope}", "")
    compute = str(row.precision.get("compute"))
    precision = next((ours for theirs, ours in _PRECISIONS.items() if compute.startswith(theirs)), None)
    if precision is None:
        raise Unsupported(what, f"no such number format: {compute}", "")
    sizes = (model.vocab, model.hidden, model.ffn, model.layers, model.heads, row.seq, row.micro_batch)
    if None in sizes or row.passes not in _PASSES or model.activation not in _ACTIVATIONS:
        raise Unsupported(what, "the row lacks sizes, or has an unknown activation", "")
    vocab, hidden, ffn, layers, heads, seq, batch = (size or 0 for size in sizes)
    tp, pp, micro_batches = layout.tp or 1, layout.pp or 1, row.grad_accum or 1
    if tp > 1 or "Megatron" in row.framework:
        vocab = -(-vocab // (PADDED_VOCABULARY * tp)) * PADDED_VOCABULARY * tp
    learned = "learned" in str(model.positions)
    try:
        shape = TransformerShape(
            vocab_size=vocab,
            d_model=hidden,
            d_ff=ffn,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=model.kv_heads,
            learned_positions=seq if learned else 0,
            norm="layernorm" if "layernorm" in str(model.norm) else "rmsnorm",
            feed_forward="swiglu" if model.ffn_matrices == 3 else "gelu",
            biases="all" if model.bias else "none",
            head="tied" if model.tied and not row.is_split else "untied",
        )
        train = row.passes == "step"
        return StepSpec(
            model=ModelSpec(name=_NAME, kind="transformer", shape=shape),
            batch=batch * micro_batches if pp > 1 else batch,
            context=seq,
            pass_name=_PASSES[row.passes],  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
            compile="block" if row.compile is True else "off",
            attention="plain" if "plain" in str(row.attention) else "sdpa_flash",
            checkpointing=_recomputed(str(row.recompute)),
            accumulation=micro_batches if train and pp == 1 else 1,
            layout=Layout(fsdp=layout.dp or 1, tp=tp, pp=pp) if row.is_split else SINGLE,
            microbatches=micro_batches if pp > 1 else None,
            reshard_after_forward="never" if row.is_split and (layout.dp or 1) > 1 else "auto",
        )
    except UserError as error:
        raise Unsupported(what, str(error), "") from error


_PRECISIONS = {"fp32": "fp32", "bf16": "bf16_pure", "fp16": "bf16_pure"}
"""Beginning of a source's words -> our precision; fp16 costs as much as bf16."""


def _recomputed(text: str) -> str:
    return "full" if text == "full" else "none" if text.startswith("none") else "selective"


def split_step(row: PublicRow, gpu: Gpu) -> LayoutTime:
    """Predicted step of a row with a split model, over its machines' links. Raises Unsupported."""
    spec = step_of(row)
    refuse_unknown_step(dataclasses.replace(spec, layout=SINGLE, microbatches=None, reshard_after_forward="auto"), gpu)
    known = next((speed for words, speed in _NETWORKS.items() if words in str(row.network)), None)
    machine = machine_of(hardware_named(gpu.name), row.gpus_per_node or _ONE_NODE, network_stated_bytes_per_s=known)
    found = LayoutClock(gpu, machine, dtensor=row.framework.startswith(_BY_DTENSOR)).time(spec)
    if found is None:
        raise Unsupported(f"predicting {row.id}", f"the network between its machines is unknown: {row.network}", "")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StackRates:
    """Differences of a source's steps from kernels alone, through software and network."""

    product_factor: float = 1.0
    attention_factor: float = 1.0
    streaming_factor: float = 1.0
    network_bytes_per_s: float = 50e9
    """Bytes/s received per GPU from other machines."""
    hop_s: float = 0.0
    """Seconds added to a message by each further rank."""
    exposed: float = 0.0
    """Share of the shorter of computation and communication that is not hidden."""
    spread: float = 0.3
    """Half of the 90 % interval, as a share of the central value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicLoad:
    """GPU and network load of a row, at its kernels' rates."""

    product_s: float
    attention_s: float
    streaming_s: float
    optimizer_s: float
    wire_bytes: float
    """Bytes received per GPU and step, if several nodes share weights or gradients; else 0."""
    hops: int
    """Messages per step times ranks passed, over several nodes; else 0."""

    def seconds(self, stack: StackRates) -> float:
        """Step time with a source's software and machines."""
        compute = (
            stack.product_factor * self.product_s
            + stack.attention_factor * self.attention_s
            + stack.streaming_factor * self.streaming_s
            + self.optimizer_s
        )
        network = self.wire_bytes / stack.network_bytes_per_s + self.hops * stack.hop_s if self.hops else 0.0
        return max(compute, network) + stack.exposed * min(compute, network)


def load_of(row: PublicRow, gpu: Gpu) -> PublicLoad:
    """Raises Unsupported for a step that cannot be predicted."""
    spec = step_of(row)
    refuse_unknown_step(spec, gpu)
    parts = throttled(parts_of(spec, gpu), gpu)
    ranks, step = row.layout.shard_ranks or 1, [part for part in parts if part.phase != "optimizer"]
    shape = spec.model.shape
    assert shape is not None
    streaming_s = _seconds(step, "streaming")
    if spec.precision != "fp32" and spec.pass_name == "train":
        moved = _LOSS_BYTES * spec.tokens * spec.micro_steps * shape.vocab_size
        streaming_s += moved / (gpu.bandwidth_bytes_per_s * gpu.rates.streaming.shares["_log_softmax_backward_data"])
    # FSDP gathers bf16 weights for both passes and scatters gradients, per micro-step, a message per block; sharded
    # state alone sends gradients and weights once.
    times = 3 * (row.grad_accum or 1) if "fsdp" in str(row.layout.shard) else 2
    times = times if (row.gpus or 1) > _ONE_NODE else 0
    return PublicLoad(
        product_s=_seconds(step, "matmul"),
        attention_s=_seconds(step, "attention"),
        streaming_s=streaming_s,
        optimizer_s=_seconds([part for part in parts if part.phase == "optimizer"], "streaming") / ranks,
        wire_bytes=times * 2 * row.num_parameters,
        hops=times * (row.model.layers or 1) * (row.gpus or 1),
    )


def _seconds(parts: list[TimePart], kind: str) -> float:
    return sum(part.seconds for part in parts if part.kind == kind)


# --- times beside those that were measured ------------------------------------------------------------------------

LEAST_ROWS = 4
"""Least rows of a source on one GPU for fitting factors."""
APART = 0.05
"""Least difference between two steps of a job that counts as an order."""
_MANY_ROWS = 20
"""From this many rows on, products, attention and streaming have separate factors."""
_KINDS = ("product_factor", "attention_factor", "streaming_factor")
_NETWORK = {True: {"network_bytes_per_s": 50e9, "exposed": 0.1}, False: {"network_bytes_per_s": 50e9, "hop_s": 1e-5}}
"""Network figures by "many rows", starting at a 400 Gbit/s card per GPU. Few rows: no hidden communication."""

Loaded = tuple[PublicRow, PublicLoad, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCheck:
    row: PublicRow
    measured_s: float
    predicted_s: float | None = None
    spread: float = 0.0
    """Half of the 90 % interval, as a share of the prediction."""
    constant_s: float | None = None
    """By one share of the stated peak, the best over the source's rows on this GPU."""
    unsupported: str | None = None

    @property
    def error(self) -> float | None:
        return self.predicted_s / self.measured_s - 1 if self.predicted_s else None

    @property
    def constant_error(self) -> float | None:
        return self.constant_s / self.measured_s - 1 if self.constant_s else None

    @property
    def inside(self) -> bool:
        return self.predicted_s is not None and abs(self.measured_s / self.predicted_s - 1) <= self.spread


def counts(row: PublicRow) -> bool:
    """True if a row's time is complete enough to be scored."""
    return row.scored and row.time_grade in ("A", "B") and row.measured_s is not None


def loaded_rows(rows: Sequence[PublicRow]) -> Iterator[Loaded]:
    for row in rows:
        measured = row.measured_s
        if not counts(row) or measured is None or row.card is None or row.is_split:
            continue
        try:
            load = load_of(row, gpu_of(hardware_named(row.card)))
        except Unsupported:
            continue
        yield row, load, measured


def check_rows(rows: Sequence[PublicRow], *, fitted: bool = True) -> list[RowCheck]:
    """fitted: with factors of a source, from its other rows; False: kernel rates alone, which is what a user gets."""
    scored = [row for row in rows if counts(row)]
    loaded = list(loaded_rows(scored))
    stacks, constants = unseen_stacks(loaded) if fitted else {}, _constants(scored)
    loads = {row.id: load for row, load, _ in loaded}
    return [_check_row(row, loads.get(row.id), stacks.get(row.id), constants.get(row.id)) for row in scored]


def _check_row(row: PublicRow, load: PublicLoad | None, stack: StackRates | None, constant_s: float | None) -> RowCheck:
    blank = RowCheck(row=row, measured_s=row.measured_s or math.nan, constant_s=constant_s)
    try:
        step_of(row)
        assert row.card is not None
        gpu = gpu_of(hardware_named(row.card))
        used = stack or StackRates(spread=gpu.rates.step.spread["elsewhere"])
        seconds = split_step(row, gpu).seconds if row.is_split else (load or load_of(row, gpu)).seconds(used)
    except Unsupported as error:
        return replace(blank, unsupported=error.why)
    return replace(blank, predicted_s=seconds, spread=used.spread)


# --- the factors of a source --------------------------------------------------------------------------------------


def unseen_stacks(rows: Sequence[Loaded]) -> dict[str, StackRates]:
    """Factors for each row by id, from a fit without similar rows; none for a source of only similar rows."""
    groups: dict[tuple[str, str], list[Loaded]] = defaultdict(list)
    for row, load, measured in rows:
        groups[row.group, str(row.card)].append((row, load, measured))
    found: dict[str, StackRates] = {}
    for own in groups.values():
        each = list(_unseen(own)) if len(own) >= LEAST_ROWS else []
        if each:
            spread = percentile([abs(load.seconds(stack) / measured - 1) for _, load, measured, stack in each], 90)
            found |= {row.id: replace(stack, spread=spread) for row, _, _, stack in each}
    return found


def _unseen(own: Sequence[Loaded]) -> Iterator[tuple[PublicRow, PublicLoad, float, StackRates]]:
    many = len({row.model.key for row, _, _ in own}) > 1
    likes = {row.id: str(row.model.key if many else row.gpus) for row, _, _ in own}
    for like in sorted(set(likes.values())):
        rest = [each for each in own if likes[each[0].id] != like]
        if rest:
            stack = fitted_stack(rest)
            yield from ((row, load, seconds, stack) for row, load, seconds in own if likes[row.id] == like)


def fitted_stack(own: Sequence[Loaded]) -> StackRates:
    many, several_nodes = len(own) >= _MANY_ROWS, any(load.hops for _, load, _ in own)
    start = dict.fromkeys(_KINDS, 1.0) if many else {"all": 1.0}
    start |= _NETWORK[many] if several_nodes else {}

    def stack(params: Params) -> StackRates:
        kinds = dict.fromkeys(_KINDS, params["all"]) if "all" in params else {}
        rest = {name: value for name, value in params.items() if name != "all"}
        return StackRates(**({"exposed": 1.0} | _NETWORK[many] | kinds | rest))

    def error(params: Params) -> float:
        if params.get("exposed", 0.0) > 1:
            return math.inf
        trial = stack(params)
        away = sum(abs(math.log(params[name] / start[name])) for name in start)
        return sum(abs(math.log(load.seconds(trial) / measured)) for _, load, measured in own) / len(own) + STAY * away

    return stack(search(error, start))


def _constants(rows: Sequence[PublicRow]) -> dict[str, float]:
    """Seconds of each row at one share of the stated peak, by the best FLOP convention (full: 6 N + 12 L d T a token):
    the median reached, fitted to all rows of a source on a GPU.
    """
    groups: dict[tuple[str, str], list[tuple[PublicRow, float]]] = defaultdict(list)
    for row in rows:
        try:
            spec = step_of(row)
        except Unsupported:
            continue
        assert row.card is not None
        passes = 1 if spec.pass_name == "forward" else 3
        attention = (row.model.layers or 0) * (row.model.hidden or 0) * spec.context
        flops = passes * 2 * (row.num_parameters + 2 * attention) * spec.tokens * spec.micro_steps
        flops *= spec.layout.data_ranks / (row.gpus or 1) if row.is_split else 1
        peak = hardware_named(row.card).peaks[DTYPE_OF_MATMULS[spec.precision]].flops_per_s
        groups[row.group, row.card].append((row, flops / peak))
    found: dict[str, float] = {}
    for own in groups.values():
        share = median(at_peak_s / (row.measured_s or 1.0) for row, at_peak_s in own)
        found |= {row.id: at_peak_s / share for row, at_peak_s in own}
    return found


def groups_of(checks: Sequence[RowCheck]) -> dict[str, list[RowCheck]]:
    """Predicted rows by source, and by source and GPU."""
    found: dict[str, list[RowCheck]] = defaultdict(list)
    for check in checks:
        if check.error is not None:
            found[check.row.group].append(check)
            found[f"{check.row.steplab_gpu or check.row.gpu}, {check.row.group}"].append(check)
    return dict(sorted(found.items()))


def summary(checks: Sequence[RowCheck]) -> tuple[str, ...]:
    """Rows, median error, p90, worst, share in the interval, and the constant's median and p90."""
    errors = [abs(check.error or 0.0) for check in checks]
    constants = [abs(check.constant_error or 0.0) for check in checks]
    figures = [median(errors), percentile(errors, 90), max(errors)], [median(constants), percentile(constants, 90)]
    off, of_constant = ([f"{100 * figure:.1f} %" for figure in some] for some in figures)
    inside = f"{100 * sum(check.inside for check in checks) / len(checks):.0f} %"
    return str(len(checks)), *off, inside, *of_constant


def ranking(checks: Sequence[RowCheck]) -> dict[str, list[bool]]:
    """By source, for pairs of a job with different times: True if predicted in measured order."""
    found: dict[str, list[bool]] = defaultdict(list)
    for first, second in itertools.combinations([check for check in checks if check.predicted_s], 2):
        if first.row.job == second.row.job and abs(first.measured_s / second.measured_s - 1) > APART:
            predicted = (first.predicted_s or 0.0) < (second.predicted_s or 0.0)
            found[first.row.group].append((first.measured_s < second.measured_s) == predicted)
    return found


def times(rows: Sequence[PublicRow]) -> None:
    for fitted in (False, True):
        checks = check_rows(rows, fitted=fitted)
        factors = "with factors from other rows" if fitted else "without any factor"
        print(f"| source, {factors} | steps | median | p90 | worst | in the interval | best constant: median | p90 |")
        print("|---|---|---|---|---|---|---|---|")
        for name, group in {"all": [check for check in checks if check.error is not None], **groups_of(checks)}.items():
            print(f"| {' | '.join((name, *summary(group)))} |")
        print()
    print("| source | pairs of one job | in the measured order |\n|---|---|---|")
    for name, pairs in ranking(checks).items():
        print(f"| {name} | {len(pairs)} | {mean(pairs):.0%} |")
    print("\n| row | not predicted |\n|---|---|")
    for check in checks:
        if check.unsupported:
            print(f"| {check.row.id} | {check.unsupported} |")


# --- memory -------------------------------------------------------------------------------------------------------

WITH_WHOLE_TOKENS = ("bigscience",)
"""Sources before sequence parallelism (Korthikanti et al. 2022): tp ranks keep all tokens between products."""
ALIKE_IN_MEMORY = {"H100 SXM 96GB HBM2e 500W": "H100 SXM"}
"""An unknown GPU with a known equal: torch's memory depends only on the architecture."""


def spec_of(row: PublicRow) -> StepSpec:
    """The row's step with its layout. Raises SteplabError for unsupported steps."""
    step, given = step_of(msgspec.structs.replace(row, layout=PublicLayout())), row.layout
    shape = step.model.shape
    assert shape is not None
    tp, pp = given.tp or 1, given.pp or 1
    padded = -(-shape.vocab_size // (PADDED_VOCABULARY * tp)) * PADDED_VOCABULARY * tp if tp > 1 else shape.vocab_size
    untied = dataclasses.replace(shape, head="untied", vocab_size=padded)  # both ends of a pipeline have a copy
    data = (row.gpus or 1) // tp // pp
    sharded = "fsdp" in str(given.shard)
    microbatches = row.grad_accum or 1
    return dataclasses.replace(
        step,
        model=ModelSpec(name=row.model.key or row.id, kind="transformer", shape=untied),
        layout=Layout(dp=1 if sharded else data, fsdp=data if sharded else 1, tp=tp, pp=pp),
        batch=step.batch * (microbatches if pp > 1 else 1),
        accumulation=1 if pp > 1 else microbatches,
        microbatches=microbatches if pp > 1 else None,
    )


def memory(rows: Iterable[PublicRow]) -> None:
    print("| row | GPUs | layout | kind | stated | predicted | error |\n|---|---|---|---|---|---|---|")
    for published in rows:
        row, stated = published, published.measured.get("memory_gib") or published.measured.get("memory_gb")
        if not row.scored or not stated:
            continue
        row = msgspec.structs.replace(row, steplab_gpu=row.steplab_gpu or ALIKE_IN_MEMORY.get(row.gpu))
        try:
            spec = spec_of(row)
        except SteplabError as error:
            print(f"left out {row.id}: {error}", file=sys.stderr)
            continue
        kind = str(row.measured.get("memory_kind"))
        reserved = "reserved" in kind or "nvidia-smi" in kind
        name = hardware_named(row.card or row.gpu).device_names[0]
        splits = row.group not in WITH_WHOLE_TOKENS
        ranks = memory_by_rank(spec, workspace_of(name).value, sharing_of(spec, sequence_parallel=splits))
        found = max(with_state(row, spec, rank, place, reserved=reserved) for place, rank in enumerate(ranks)) / GIB
        said = f"{stated:.1f} GiB | {found:.1f} GiB | {100 * (found / stated - 1):+.0f} %"
        print(f"| {row.id} | {row.gpus} | {spec.layout} | {kind} | {said} |")


def with_state(row: PublicRow, spec: StepSpec, rank: RankMemory, place: int, *, reserved: bool) -> float:
    """Memory of a rank with the source's state instead of ours."""
    size = rank.reserved_bytes if reserved else rank.peak_bytes
    group = rank_groups(spec)[place]
    # torch's pipelines allocate messages of all microbatches beforehand; these programs one at a time.
    messages = [term for term in rank.terms if term.what.endswith("from neighbours")]
    size -= sum(term.num_bytes * (term.count - rank.in_flight - 1) for term in messages)
    if "nvidia-smi" in str(row.measured.get("memory_kind")):
        size += outside_bytes(spec.layout)
    kept = str(row.precision.get("parameters"))
    weights = updated_elements(spec, group, own_model(spec))
    ours = rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes
    if kept.startswith("fp32 shards"):
        return size - ours + 16 * weights / spec.layout.fsdp
    if "master" not in kept:
        return size
    # Each rank has whole 16-bit weights, so none are gathered, unlike with FSDP2.
    size -= sum(term.num_bytes * term.count for term in rank.terms if term.what == "gathered weights")
    # Gradients summed in fp32 after a backward pass also exist in 16 bits until then (nanotron,
    # src/nanotron/optim/gradient_accumulator.py).
    gradients = 4 + 2 if "fp32" in str(row.precision.get("gradients")) else 2
    ranks = row.layout.shard_ranks or 1 if "zero1" in str(row.layout.shard) else 1
    return size - ours + weights * (2 + gradients + 12 / ranks)


if __name__ == "__main__":
    {"times": times, "memory": memory}[sys.argv[1] if sys.argv[1:] else "times"](read_rows())
