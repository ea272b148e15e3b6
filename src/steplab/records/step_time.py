"""Predicted step time by phase, and its comparison with measured times."""

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
    """Predicted kernels of one kind and operator in one phase."""

    phase: str
    """forward, backward or optimizer."""
    kind: str
    """matmul, attention, or streaming (bounded by memory bandwidth)."""
    what: str
    """Operator name as in torch's traces, or 'fused' for kernels that a compiler merged."""
    dtype: str
    kernels: int
    seconds: float
    """Central prediction of the kernels' total time, with gaps."""
    flops: float
    moved_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTimes:
    phase: str
    """forward, backward, optimizer or step."""
    seconds: float
    low_s: float
    """Lower end of the 90 % interval."""
    high_s: float
    """Upper end of the 90 % interval."""
    device_s: float
    """Central prediction of the phase's time if the device never waits for the host."""
    host_s: float
    """Time that Python takes on a fast CPU to launch the phase; if longer than `device_s`, the device waits."""
    slow_host_s: float
    bound: Bound
    """Main limit of `seconds`: compute, memory bandwidth, or waiting for the host."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StepTimePrediction:
    """Predicted step time in one process, from a dry run of its operators and the rates of their kernels.

    `phases` ends with the step, their sum. The times in `parts` sum to the step's device_s.
    """

    gpu: str
    phases: tuple[PhaseTimes, ...]
    parts: tuple[TimePart, ...]
    is_fitted: bool
    """True if the kernels' rates were fitted to steps on this GPU in this precision. Else those of another GPU or
    precision are scaled by data sheets. The interval is then wider, unless its width comes from steps on this GPU.
    """
    tokens_per_step: int | None = None
    """Tokens per step; None: unknown, as if a model sizes its batches."""
    utilizations: tuple[Utilization, ...] = ()
    """MFU at the central prediction, under each convention with known sizes, and HFU."""
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
    """Predicted memory and time of a step; `why_not` explains a missing one."""

    spec: StepSpec
    memory: MemoryPrediction | None
    time: StepTimePrediction | None
    layout: LayoutPlan | None = None
    why_not: tuple[str, ...] = ()

    def __repr__(self) -> str:
        told = [format_bytes(self.memory.peak_bytes)] if self.memory else []
        told += [f"{format_time(self.time.central_s)} on {self.time.gpu}"] if self.time else []
        return f"<{type(self).__name__} {describe(self.spec)}: {'; '.join([*told, *self.why_not])}>"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeCheck:
    """Predicted and measured time and memory of one step."""

    id: str
    gpu: str
    """GPU's name in hardware.toml, else in the record."""
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
    """Measured peak of allocated bytes. None: not measured, or it lacks the memory of torch.compile's CUDA graphs."""
    fitted: bool = False
    """True if the rates were fitted to this step or one like it; else the step was held out, or measured later."""
    device_waited: bool = False
    """True if the GPU may have waited for Python. It is judged by the CPU's speed, found from all checked runs on this
    GPU; for models of transformers, by the run's own times and the prediction.
    """
    unsupported: str | None = None

    @property
    def error(self) -> float | None:
        """Predicted time / measured - 1; None if either is missing."""
        if self.predicted_step_time_s is None or not self.measured_step_time_s:
            return None
        return self.predicted_step_time_s / self.measured_step_time_s - 1

    @property
    def inside(self) -> bool | None:
        if self.low_s is None or self.high_s is None or self.measured_step_time_s is None:
            return None
        return self.low_s <= self.measured_step_time_s <= self.high_s
