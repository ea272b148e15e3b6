"""Steps that others measured and published, as steps of this project: rows of benchmarks/public_training.json.xz.

A row whose ranks split the model becomes a step on a layout (plan.layout.time). Of any other, each rank has the whole
model, and the row becomes the step of one: its model, its batch, and its weights in bf16, as FSDP gathers them or as
they are kept. The optimizer's update is divided by the ranks that share its state, and the loss is taken in fp32. What
their software, attention and network add is told by few factors for each source and GPU (StackRates).
"""

import dataclasses
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from steplab.costs.rates import Gpu
from steplab.errors import Unsupported, UserError
from steplab.plan.layout.links import machine_of
from steplab.plan.layout.time import LayoutClock
from steplab.plan.time import parts_of, refuse_unknown_step, throttled
from steplab.records.layout_plan import LayoutTime
from steplab.records.step_time import TimePart
from steplab.specs.hardware import hardware_named
from steplab.specs.layout import SINGLE, Layout
from steplab.specs.model import ModelSpec, TransformerShape
from steplab.specs.step import StepSpec

TABLE = Path(__file__).parent / "public_training.json.xz"
_NAME = "medium"
"""Size that a published model is written as, with all its sizes changed."""
_LOSS_BYTES = 24
"""Bytes for each logit: what a loss in fp32 moves beyond one in bf16. Both copy, log_softmax, their gradients and that
of nll_loss: 36 bytes against 12."""
_ONE_NODE = 8
_ASSUMED_GPU = {"A100 (unstated kind)": "A100 SXM 80GB"}
"""GPUs whose kind a source leaves open -> the one that is assumed."""
_NETWORKS = {
    "800 Gb/s a node": 12.5e9,
    "4 x Omni-Path 100 a node": 6.25e9,
    "HDR InfiniBand": 25e9,
    "EFA (AWS p5)": 50e9,
}
"""Parts of a source's words for the network between nodes -> stated bytes per second of each of eight GPUs: its share
of the node's, 200 Gbit/s for each GPU of Selene, 3200 for a p5 node."""
_BY_DTENSOR = ("KempnerForge", "torchtitan")
"""Programs that split tensors by torch's DTensor, which costs Python time; Megatron's and nanotron's layers do not."""
PADDED_VOCABULARY = 128
"""Megatron-LM pads the vocabulary to a multiple of this times its tensor-parallel ranks
(--make-vocab-size-divisible-by)."""
_ACTIVATIONS = {"gelu": "gelu", "relu": "gelu", "silu": "swiglu", "swiglu": "swiglu"}
"""relu costs what gelu does: bandwidth bounds both."""
_PASSES = {"step": "train", "forward (no grad)": "forward", "forward+backward": "forward_backward"}


class PublicModel(msgspec.Struct, frozen=True):
    """The model of a row."""

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
    """How its GPUs share a step."""

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    shard: str | None = None
    shard_ranks: int | None = None
    dp: int | None = None


class PublicRow(msgspec.Struct, frozen=True):
    """A row, as far as a prediction needs it."""

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
        """Name of its GPU in the catalogue; None: it is not there."""
        return self.steplab_gpu or _ASSUMED_GPU.get(self.gpu)

    @property
    def is_split(self) -> bool:
        """Whether no rank has the whole model."""
        return (self.layout.tp or 1) > 1 or (self.layout.pp or 1) > 1

    @property
    def job(self) -> str:
        """What rows of one job share, whatever their layouts and micro-batches."""
        model = (self.model.key, self.model.layers, self.model.hidden, self.seq, self.recompute, self.passes)
        return f"{self.group} {model} {self.gpus}×{self.gpu} {self.global_batch}"

    @property
    def measured_s(self) -> float | None:
        """Seconds of a step."""
        found = (self.derived or {}).get("step_time_s") or self.measured.get("step_time_s")
        return float(found) if found else None

    @property
    def num_parameters(self) -> float:
        """Parameters of the matrices, about: 12 L d² for the usual block, and the vocabulary."""
        m = self.model
        layer = (2 + 2 * (m.kv_heads or m.heads or 1) / (m.heads or 1)) * (m.hidden or 0) ** 2
        layer += (m.ffn_matrices or 2) * (m.hidden or 0) * (m.ffn or 0)
        return (m.layers or 0) * layer + (1 if m.tied else 2) * (m.vocab or 0) * (m.hidden or 0)


class _File(msgspec.Struct):
    rows: list[PublicRow]


def read_rows(path: Path = TABLE) -> list[PublicRow]:
    """The rows of a table."""
    return msgspec.json.decode(lzma.decompress(path.read_bytes()), type=_File).rows


def step_of(row: PublicRow) -> StepSpec:
    """The step of one rank. Raises Unsupported with the reason why there is none."""
    what, model, layout = f"predicting {row.id}", row.model, row.layout
    if row.card is None:
        raise Unsupported(what, f"the GPU is not in the catalogue: {row.gpu}", "")
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
        raise Unsupported(what, "the row lacks sizes, or its activation is not known", "")
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
"""Beginning of what a source says -> precision of our step; fp16 costs what bf16 does."""


def _recomputed(text: str) -> str:
    return "full" if text == "full" else "none" if text.startswith("none") else "selective"


def split_step(row: PublicRow, gpu: Gpu) -> LayoutTime:
    """The predicted step of a row whose ranks split the model, by the links of its machines. Raises Unsupported for one
    that cannot be predicted."""
    spec = step_of(row)
    refuse_unknown_step(dataclasses.replace(spec, layout=SINGLE, microbatches=None, reshard_after_forward="auto"), gpu)
    known = next((speed for words, speed in _NETWORKS.items() if words in str(row.network)), None)
    machine = machine_of(hardware_named(gpu.name), row.gpus_per_node or _ONE_NODE, network_stated_bytes_per_s=known)
    found = LayoutClock(gpu, machine, dtensor=row.framework.startswith(_BY_DTENSOR)).time(spec)
    if found is None:
        raise Unsupported(f"predicting {row.id}", f"the network between its machines is not known: {row.network}", "")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StackRates:
    """How steps of one source of published figures differ from kernels by themselves: by its software and network."""

    product_factor: float = 1.0
    """Times which products take longer."""
    attention_factor: float = 1.0
    """Times which fused attention takes longer."""
    streaming_factor: float = 1.0
    """Times which all else takes longer."""
    network_bytes_per_s: float = 50e9
    """What each GPU receives per second from ranks on other machines."""
    hop_s: float = 0.0
    """Seconds that every further rank adds to a message."""
    exposed: float = 0.0
    """Share of the shorter of computation and communication that the other does not hide."""
    spread: float = 0.3
    """Half of the 90 % interval, as a share of the central value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicLoad:
    """What a row asks of a GPU, with the rates of its kernels, and of the network."""

    product_s: float
    attention_s: float
    streaming_s: float
    optimizer_s: float
    wire_bytes: float
    """Received by each GPU in a step, if ranks on several nodes share weights or gradients; else 0."""
    hops: int
    """Messages of a step times the ranks that each passes, over several nodes; else 0."""

    def seconds(self, stack: StackRates) -> float:
        """The step by a source's software on its machines."""
        compute = (
            stack.product_factor * self.product_s
            + stack.attention_factor * self.attention_s
            + stack.streaming_factor * self.streaming_s
            + self.optimizer_s
        )
        network = self.wire_bytes / stack.network_bytes_per_s + self.hops * stack.hop_s if self.hops else 0.0
        return max(compute, network) + stack.exposed * min(compute, network)


def load_of(row: PublicRow, gpu: Gpu) -> PublicLoad:
    """The load of a row. Raises Unsupported for a step that cannot be predicted."""
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
    spread = (row.gpus or 1) > _ONE_NODE
    return PublicLoad(
        product_s=_seconds(step, "matmul"),
        attention_s=_seconds(step, "attention"),
        streaming_s=streaming_s,
        optimizer_s=_seconds([part for part in parts if part.phase == "optimizer"], "streaming") / ranks,
        wire_bytes=_wire_bytes(row) if spread else 0.0,
        hops=_messages(row) * (row.gpus or 1) if spread else 0,
    )


def _wire_bytes(row: PublicRow) -> float:
    """Weights in bf16 gathered for both passes and gradients scattered, in each micro-step; or with state alone
    sharded, gradients and weights once."""
    each = 2 * row.num_parameters
    gathers = "fsdp" in str(row.layout.shard)
    return 3 * each * (row.grad_accum or 1) if gathers else 2 * each


def _messages(row: PublicRow) -> int:
    """One a block, as often as `_wire_bytes` counts."""
    layers = row.model.layers or 1
    return 3 * layers * (row.grad_accum or 1) if "fsdp" in str(row.layout.shard) else 2 * layers


def _seconds(parts: list[TimePart], kind: str) -> float:
    return sum(part.seconds for part in parts if part.kind == kind)
