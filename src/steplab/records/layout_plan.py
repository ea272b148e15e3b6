"""Predicted times of a step by layout."""

from dataclasses import dataclass
from typing import Literal

from steplab.records.prediction import FitVerdict
from steplab.records.run import ModelFacts, Utilization
from steplab.specs.step import StepSpec, describe
from steplab.units import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisTraffic:
    """Messages of one axis and collective in a step of the slowest rank."""

    axis: str
    """dp, fsdp, tp or pp."""
    collective: str
    """all_reduce, all_gather, reduce_scatter or send_recv."""
    carries: str = ""
    phase: str
    """Phase of sending: forward, backward, after backward, or optimizer."""
    ranks: int
    link: str
    """Slowest link crossed, such as 'NVLink 4'."""
    messages: int
    total_bytes: int
    wire_bytes: float
    """Least bytes that a rank sends."""
    alone_s: float
    """Seconds with no computation."""
    exposed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutTime:
    """Predicted time of a step on a layout, for the slowest ranks."""

    seconds: float
    low_s: float
    """Lower end of the 90 % interval."""
    high_s: float
    compute_spread: float
    """Half of the interval as a share of time without communication."""
    communication_spread: float
    """Half of the interval as a share of `exposed_s`."""
    compute_s: float
    """Seconds of forward and backward kernels, without communication."""
    waiting_s: float
    """Device seconds of waiting for launches in these passes."""
    optimizer_s: float
    copies_s: float
    """Seconds of copies into and out of message buffers."""
    exposed_s: float
    bubble_s: float
    """Seconds of filling and draining a pipeline."""
    ranks: str
    traffic: tuple[AxisTraffic, ...]
    """Messages of those ranks in a step; their `exposed_s` sums to `exposed_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCandidate:
    layout: str
    options: str
    """Options for `steplab run` that depend on the layout."""
    spec: StepSpec | None = None
    verdict: FitVerdict | Literal["not possible"] = "not possible"
    """Fit in GPU memory; not possible: the model or batch cannot be split so."""
    reason: str = ""
    peak_bytes: int | None = None
    """Peak allocated bytes on the ranks that need most; None: not possible."""
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    """Device memory that surely suffices."""
    worst_rank: str = ""
    time: LayoutTime | None = None
    """Predicted time; None: a link is unknown, or it does not fit. A layout that you gave has a time all the same."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LayoutPlan:
    """All layouts of a job on some GPUs: fitting ones first, fastest first."""

    spec: StepSpec
    """The step without a layout; with checkpointing auto, each layout's spec has its own."""
    gpu: str
    gpus: int
    gpus_per_node: int
    global_batch: int
    """Sequences per step over all ranks."""
    usable_bytes: int
    candidates: tuple[LayoutCandidate, ...]
    num_as_fast: int
    """First layouts too close to the fastest: their intervals contain its prediction."""
    network: str = ""
    """Network between nodes, such as InfiniBand NDR; empty: unknown."""
    network_bytes_per_s: float | None = None
    """Assumed bytes/s per GPU and direction over it; None: unknown."""
    network_stated_bytes_per_s: float | None = None
    """Stated bandwidth behind that assumption; None: a measured one was given, or none."""
    tokens: float | None = None
    utilizations: tuple[Utilization, ...] = ()
    """MFU of the fastest at its central time, by convention."""
    model: ModelFacts | None = None
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema: str = "steplab.layout_plan/1"

    @property
    def between_nodes(self) -> bool:
        """True if messages cross nodes, where times are assumed, not measured."""
        return self.gpus > self.gpus_per_node

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.spec.context

    def __repr__(self) -> str:
        fastest = next((each for each in self.candidates if each.time), None)
        told = f"the fastest {fastest.layout}" if fastest else "none fits"
        where = f"{counted(len(self.candidates), 'layout')} on {self.gpus} {self.gpu}"
        return f"<{type(self).__name__} {describe(self.spec)}: {where}, {told}>"
