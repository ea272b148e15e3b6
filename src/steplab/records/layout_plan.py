"""Predicted times of a step by layout."""

from dataclasses import dataclass
from typing import Literal

from steplab.records.prediction import FitVerdict
from steplab.records.run import ModelFacts, Utilization
from steplab.specs.step import StepSpec, describe
from steplab.units import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisTraffic:
    """Messages of one collective on one mesh axis, per step of the slowest rank."""

    axis: str
    """dp, fsdp, tp or pp."""
    collective: str
    """all_reduce, all_gather, reduce_scatter or send_recv."""
    carries: str = ""
    phase: str
    """Phase when they are sent: forward, backward, after backward, or optimizer."""
    ranks: int
    link: str
    """Slowest link that they cross, such as 'NVLink 4'."""
    messages: int
    total_bytes: int
    wire_bytes: float
    """Least bytes that a rank must send."""
    alone_s: float
    """Communication seconds without concurrent computation."""
    exposed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutTime:
    """Predicted step time of a layout, on its slowest ranks."""

    seconds: float
    low_s: float
    """Lower end of the 90 % interval."""
    high_s: float
    compute_spread: float
    """Error of predicted computation: half the width of its 90 % interval, over the step time without communication."""
    communication_spread: float
    """Error of predicted communication: half the width of its 90 % interval, over `exposed_s`."""
    compute_s: float
    """Kernel seconds of forward and backward, without communication."""
    waiting_s: float
    """Seconds of forward and backward while the device waits for launches."""
    optimizer_s: float
    copies_s: float
    """Seconds of copying into and out of message buffers."""
    exposed_s: float
    bubble_s: float
    """Idle seconds while the pipeline fills and drains."""
    ranks: str
    traffic: tuple[AxisTraffic, ...]
    """Messages of `ranks` per step; the sum of their `exposed_s` is this `exposed_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCandidate:
    layout: str
    options: str
    """Options of `steplab run` that select this layout."""
    spec: StepSpec | None = None
    verdict: FitVerdict | Literal["not possible"] = "not possible"
    """Fit in GPU memory. not possible: the model or batch cannot be split this way."""
    reason: str = ""
    peak_bytes: int | None = None
    """Peak allocated bytes on the ranks with the highest peak; None: not possible."""
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    """Device memory that is certainly enough."""
    worst_rank: str = ""
    time: LayoutTime | None = None
    """Predicted time. None: a link's speed is unknown, or the layout does not fit. A layout that you name has a time
    even if it does not fit.
    """


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LayoutPlan:
    """All layouts of a job on some GPUs: those that fit first, by time."""

    spec: StepSpec
    """Spec without a layout; with checkpointing auto, each layout's spec sets its own."""
    gpu: str
    gpus: int
    gpus_per_node: int
    global_batch: int
    """Sequences per step over all ranks."""
    usable_bytes: int
    candidates: tuple[LayoutCandidate, ...]
    num_as_fast: int
    """Number of layouts, including the first, that are slower than it by no more than the predictions' errors."""
    network: str = ""
    """Network between nodes, such as InfiniBand NDR; empty: unknown."""
    network_bytes_per_s: float | None = None
    """Assumed network bandwidth per GPU and direction; None: unknown."""
    network_stated_bytes_per_s: float | None = None
    """Vendor's bandwidth from which `network_bytes_per_s` follows; None: you gave a measured one, or none."""
    tokens: float | None = None
    utilizations: tuple[Utilization, ...] = ()
    """MFU of the fastest layout, by convention."""
    model: ModelFacts | None = None
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema: str = "steplab.layout_plan/1"

    @property
    def between_nodes(self) -> bool:
        """True if messages cross nodes; their times are then assumed, not measured."""
        return self.gpus > self.gpus_per_node

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.spec.context

    def __repr__(self) -> str:
        fastest = next((each for each in self.candidates if each.time), None)
        told = f"the fastest {fastest.layout}" if fastest else "none fits"
        where = f"{counted(len(self.candidates), 'layout')} on {self.gpus} {self.gpu}"
        return f"<{type(self).__name__} {describe(self.spec)}: {where}, {told}>"
