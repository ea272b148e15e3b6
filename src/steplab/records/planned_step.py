"""The prediction of one of several steps that are planned together."""

from dataclasses import dataclass

from steplab.records.prediction import MemoryPrediction
from steplab.records.step_time import StepTimePrediction
from steplab.specs.step import StepSpec, describe
from steplab.units import format_bytes, format_time


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlannedStep:
    """Predicted memory and time of a step; what cannot be predicted has a reason in its place."""

    spec: StepSpec
    """The step."""
    memory: MemoryPrediction | None
    """Its memory on a CUDA device."""
    time: StepTimePrediction | None
    """Its time on one GPU."""
    why_not: tuple[str, ...] = ()
    """Why one or the other is missing."""

    def __repr__(self) -> str:
        told = [format_bytes(self.memory.peak_bytes)] if self.memory else []
        told += [f"{format_time(self.time.central_s)} on {self.time.gpu}"] if self.time else []
        return f"<{type(self).__name__} {describe(self.spec)}: {'; '.join([*told, *self.why_not])}>"
