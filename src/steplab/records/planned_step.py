"""The prediction of one of several steps that are planned together."""

from dataclasses import dataclass

from steplab.records.prediction import MemoryPrediction
from steplab.records.step_time import StepTimePrediction
from steplab.specs.step import StepSpec


@dataclass(frozen=True, kw_only=True, slots=True)
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
