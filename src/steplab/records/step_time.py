"""The predicted time of a step, by the phases in which it is measured."""

from dataclasses import dataclass
from typing import Literal

from steplab.records.layout_plan import LayoutPlan
from steplab.records.prediction import CardFit, MemoryPrediction
from steplab.records.run import Utilization
from steplab.specs.step import StepSpec, describe
from steplab.units import format_bytes, format_time

Bound = Literal["compute", "memory", "host"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePart:
    """Kernels of one kind in one phase."""

    phase: str
    """forward, backward or optimizer."""
    kind: str
    """matmul, attention, or streaming for what memory bandwidth bounds."""
    what: str
    """Operator by the name of torch's traces; 'fused' for kernels that a compiler joins."""
    dtype: str
    """Number format of the computation."""
    kernels: int
    """Number of kernels."""
    seconds: float
    """Central value of their time together, gaps between them included."""
    flops: float
    """FLOPs of all of them."""
    moved_bytes: float
    """Least number of bytes that they move."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTimes:
    """The predicted time of one phase, or of the step."""

    phase: str
    """forward, backward, optimizer or step."""
    seconds: float
    """Central value."""
    low_s: float
    """Lower end of the 90 % interval."""
    high_s: float
    """Upper end of the 90 % interval."""
    device_s: float
    """Central value of the device's own time: what it takes if the host is always ahead."""
    host_s: float
    """Time that Python takes to launch it on a quick host; the device waits where that is longer."""
    slow_host_s: float
    """The same on a slow host."""
    bound: Bound
    """What most of the central value goes to: products at the peak, memory, or waiting for the host."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StepTimePrediction:
    """The time of one step of one process, from a dry run of its operators and rates of kernels.

    `phases` has the phases and, last, the step: the sum of the phases. The seconds of `parts` sum to its device_s.
    """

    gpu: str
    """GPU, by its name in the catalogue of hardware."""
    phases: tuple[PhaseTimes, ...]
    """Times by phase; the last is the step."""
    parts: tuple[TimePart, ...]
    """What the device's time is made of."""
    is_fitted: bool
    """Whether rates of this GPU, this precision and this way of compiling were fitted to records; otherwise those of
    others are used, and the interval is wider unless steps were measured on this GPU."""
    tokens_per_step: int | None = None
    """Tokens of the step; None: not known, as of a model that sizes its batches itself."""
    utilizations: tuple[Utilization, ...] = ()
    """MFU at the central value under every convention whose sizes are known, and HFU."""
    fit: CardFit | None = None
    """Whether the step's predicted memory fits the GPU; None: not predicted."""
    least_device_bytes: int | None = None
    """Memory that the GPU must have at least, as predicted."""
    sources: tuple[str, ...] = ()
    """Sources of the GPU's figures and of the rates."""
    notes: tuple[str, ...] = ()
    """What is assumed, and what is left out."""
    spec: StepSpec | None = None
    """The predicted step; None: not stored."""
    schema: str = "steplab.step_time_prediction/1"
    """Format of this record."""

    def __repr__(self) -> str:
        step = f"{describe(self.spec)}: " if self.spec else ""
        between = f"90 % interval {format_time(self.low_s)} to {format_time(self.high_s)}"
        return f"<{type(self).__name__} {step}{format_time(self.central_s)} on {self.gpu} ({between})>"

    @property
    def step(self) -> PhaseTimes:
        """The whole step."""
        return self.phases[-1]

    @property
    def central_s(self) -> float:
        """Central value of the step's time."""
        return self.step.seconds

    @property
    def low_s(self) -> float:
        """Lower end of the step's 90 % interval."""
        return self.step.low_s

    @property
    def high_s(self) -> float:
        """Upper end of the step's 90 % interval."""
        return self.step.high_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second at the central value; None if the tokens of the step are not known."""
        return self.tokens_per_step / self.central_s if self.tokens_per_step else None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlannedStep:
    """Predicted memory and time of a step; what cannot be predicted has a reason in its place."""

    spec: StepSpec
    """The step."""
    memory: MemoryPrediction | None
    """Its memory on a CUDA device."""
    time: StepTimePrediction | None
    """Its time on one GPU."""
    layout: LayoutPlan | None = None
    """Its time on the several GPUs of its layout."""
    why_not: tuple[str, ...] = ()
    """Why one or the other is missing."""

    def __repr__(self) -> str:
        told = [format_bytes(self.memory.peak_bytes)] if self.memory else []
        told += [f"{format_time(self.time.central_s)} on {self.time.gpu}"] if self.time else []
        return f"<{type(self).__name__} {describe(self.spec)}: {'; '.join([*told, *self.why_not])}>"
