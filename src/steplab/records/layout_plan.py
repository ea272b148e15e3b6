"""Predictions of the time of a step on a layout, and the layouts of a job side by side."""

from dataclasses import dataclass
from typing import Literal

from steplab.records.prediction import FitVerdict
from steplab.records.run import Utilization
from steplab.specs.step import StepSpec, describe
from steplab.units import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisTraffic:
    """Messages of one axis and one collective in a step of the slowest rank."""

    axis: str
    """Axis of the layout: dp, fsdp, tp or pp."""
    collective: str
    """The collective: all_reduce, all_gather, reduce_scatter or send_recv."""
    carries: str = ""
    """What is in them, in words."""
    phase: str
    """Phase in which they are sent: forward, backward, after backward, or optimizer."""
    ranks: int
    """Number of ranks that exchange them."""
    link: str
    """The slowest link that they cross, such as 'NVLink 4'."""
    messages: int
    """Number of messages."""
    total_bytes: int
    """Bytes of all messages."""
    wire_bytes: float
    """Least number of bytes that a rank sends for them."""
    alone_s: float
    """Seconds that they take with nothing beside them."""
    exposed_s: float
    """Seconds that they add to the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutTime:
    """The predicted time of a step on a layout, of the ranks that take longest."""

    seconds: float
    """Central value."""
    low_s: float
    """Lower end of the 90 % interval."""
    high_s: float
    """Upper end of the 90 % interval."""
    compute_spread: float
    """Half of the interval as a share of what is not communication."""
    communication_spread: float
    """Half of the interval as a share of `exposed_s`."""
    compute_s: float
    """Seconds of kernels of forward and backward passes, without communication."""
    waiting_s: float
    """Seconds in which the device waits in these passes for the host to launch."""
    optimizer_s: float
    """Seconds of the update."""
    copies_s: float
    """Seconds of copies into and out of the buffers of messages."""
    exposed_s: float
    """Seconds that communication adds."""
    bubble_s: float
    """Seconds in which a pipeline fills and drains."""
    ranks: str
    """The ranks that these figures are of."""
    traffic: tuple[AxisTraffic, ...]
    """What those ranks send in a step; the sum of its `exposed_s` is `exposed_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCandidate:
    """One layout of a job, which fits or does not."""

    layout: str
    """The layout as `--layout` takes it."""
    options: str
    """All options of the step that depend on the layout, as `steplab run` takes them."""
    spec: StepSpec | None = None
    """The step; None where it cannot be made."""
    verdict: FitVerdict | Literal["not possible"] = "not possible"
    """Whether its memory fits the GPU; not possible: the model or the batch cannot be split so."""
    reason: str = ""
    """Why it does not fit, or is not possible."""
    peak_bytes: int | None = None
    """Most bytes allocated on the ranks that need most; None: not possible."""
    reserved_bytes: int | None = None
    """Most bytes that the allocator reserves there."""
    device_bytes: int | None = None
    """Memory of a device that is sure to run it."""
    worst_rank: str = ""
    """The ranks that need most memory."""
    time: LayoutTime | None = None
    """Predicted time; None where it does not fit, or a link is not known."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LayoutPlan:
    """Every layout of a job on a number of GPUs, those that fit first, the fastest first."""

    spec: StepSpec
    """The job: the step without a layout; with checkpointing auto, each layout's own is in its spec."""
    gpu: str
    """GPU, by its name in the catalogue of hardware."""
    gpus: int
    """Number of GPUs."""
    gpus_per_node: int
    """Number of GPUs in a node."""
    global_batch: int
    """Sequences in a step of all ranks together."""
    usable_bytes: int
    """Memory of a GPU that a program can use."""
    candidates: tuple[LayoutCandidate, ...]
    """The layouts."""
    num_as_fast: int
    """How many of the first layouts cannot be told from the fastest, because their intervals overlap with its
    prediction."""
    network: str = ""
    """Network between nodes, such as InfiniBand NDR; empty: none is known."""
    network_bytes_per_s: float | None = None
    """Bytes per second of one GPU, in one direction, that messages are taken to reach over it; None: not known."""
    network_stated_bytes_per_s: float | None = None
    """The bandwidth that is stated for it, of which that is a share; None: what is reached was given, or nothing."""
    tokens: float | None = None
    """Tokens of the whole training; None: not asked for."""
    utilizations: tuple[Utilization, ...] = ()
    """MFU of the fastest at its central time, under every convention."""
    sources: tuple[str, ...] = ()
    """Sources of the figures of the GPU and its links."""
    notes: tuple[str, ...] = ()
    """What is assumed, and what is left out."""
    schema: str = "steplab.layout_plan/1"
    """Format of this record."""

    @property
    def between_nodes(self) -> bool:
        """Whether messages cross a network between nodes, of whose times there is no measurement."""
        return self.gpus > self.gpus_per_node

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step of all GPUs."""
        return self.global_batch * self.spec.context

    def __repr__(self) -> str:
        fastest = next((each for each in self.candidates if each.time), None)
        told = f"the fastest {fastest.layout}" if fastest else "none fits"
        where = f"{counted(len(self.candidates), 'layout')} on {self.gpus} {self.gpu}"
        return f"<{type(self).__name__} {describe(self.spec)}: {where}, {told}>"
