"""Predicted step time, by the measured phases, and against measured times."""

from dataclasses import dataclass
from typing import Literal

from steplab.records.layout_plan import LayoutPlan
from steplab.records.prediction import CardFit, MemoryPrediction
from steplab.records.run import ModelFacts, Utilization
from steplab.specs.step import StepSpec, describe
from steplab.units import format_bytes, format_time

Bound = Literal["compute", "memory", "host"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePart:
    """Kernels of one kind in one phase."""

    phase: str
    """forward, backward or optimizer."""
    kind: str
    """matmul, attention, or streaming (bounded by memory bandwidth)."""
    what: str
    """Operator as in torch's traces; 'fused' for kernels merged by a compiler."""
    dtype: str
    kernels: int
    """Kernels launched per step."""
    seconds: float
    """Central value of their total time, with gaps."""
    flops: float
    moved_bytes: float
    """Least bytes that they move."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTimes:
    """Predicted time of a phase, or of the step."""

    phase: str
    """forward, backward, optimizer or step."""
    seconds: float
    low_s: float
    """Lower end of the 90 % interval."""
    high_s: float
    """Upper end of the 90 % interval."""
    device_s: float
    """Central device time if the host is always ahead."""
    host_s: float
    """Launch time on a fast host; the device waits if it is longer."""
    slow_host_s: float
    bound: Bound
    """Largest part of the central value: products at the peak, memory, or waiting for the host."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StepTimePrediction:
    """Time of one step of one process, from a dry run of its operators and kernel rates.

    `phases` ends with the step, the sum of the phases. `parts` sum to its device_s.
    """

    gpu: str
    phases: tuple[PhaseTimes, ...]
    """Times by phase; the last is the step."""
    parts: tuple[TimePart, ...]
    is_fitted: bool
    """True if rates were fitted for this GPU, precision and compile mode. Otherwise others' rates apply, with a wider
    interval unless steps were measured on this GPU.
    """
    tokens_per_step: int | None = None
    """Tokens per step; None: unknown, as for a model that sizes its batches."""
    utilizations: tuple[Utilization, ...] = ()
    """MFU at the central value under each convention with known sizes, and HFU."""
    fit: CardFit | None = None
    least_device_bytes: int | None = None
    model: ModelFacts | None = None
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    spec: StepSpec | None = None
    schema: str = "steplab.step_time_prediction/1"

    def __repr__(self) -> str:
        step = f"{describe(self.spec)}: " if self.spec else ""
        between = f"90 % interval {format_time(self.low_s)} to {format_time(self.high_s)}"
        return f"<{type(self).__name__} {step}{format_time(self.central_s)} on {self.gpu} ({between})>"

    @property
    def step(self) -> PhaseTimes:
        return self.phases[-1]

    @property
    def central_s(self) -> float:
        return self.step.seconds

    @property
    def low_s(self) -> float:
        return self.step.low_s

    @property
    def high_s(self) -> float:
        return self.step.high_s

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens_per_step / self.central_s if self.tokens_per_step else None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlannedStep:
    """Predicted memory and time of a step; a missing prediction has a reason."""

    spec: StepSpec
    memory: MemoryPrediction | None
    time: StepTimePrediction | None
    layout: LayoutPlan | None = None
    """Its time on the GPUs of its layout."""
    why_not: tuple[str, ...] = ()

    def __repr__(self) -> str:
        told = [format_bytes(self.memory.peak_bytes)] if self.memory else []
        told += [f"{format_time(self.time.central_s)} on {self.time.gpu}"] if self.time else []
        return f"<{type(self).__name__} {describe(self.spec)}: {'; '.join([*told, *self.why_not])}>"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeCheck:
    """A prediction and a measurement of the same step."""

    id: str
    gpu: str
    """Name of the GPU in hardware.toml, else in the record."""
    cell: str
    precision: str
    compiled: bool
    predicted_step_time_s: float | None = None
    """Central value; None: not predicted."""
    low_s: float | None = None
    """Lower end of the 90 % interval."""
    high_s: float | None = None
    measured_step_time_s: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    """Measured peak of allocated bytes; None: not measured, or without what CUDA graphs of torch.compile keep."""
    fitted: bool = False
    """True if rates were fitted to it or to similar steps; otherwise it was held out, or came later."""
    device_waited: bool = False
    """True if the GPU may have waited for Python, judged by that CPU's pace in the same records; for other models, by
    the record and the prediction.
    """
    unsupported: str | None = None

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1; None without both."""
        if self.predicted_step_time_s is None or not self.measured_step_time_s:
            return None
        return self.predicted_step_time_s / self.measured_step_time_s - 1

    @property
    def inside(self) -> bool | None:
        if self.low_s is None or self.high_s is None or self.measured_step_time_s is None:
            return None
        return self.low_s <= self.measured_step_time_s <= self.high_s
