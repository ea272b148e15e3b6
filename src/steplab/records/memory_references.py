"""Runs and predictions that a run's memory is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp32Forecast:
    """Predictions by a dry run for a step that was measured in low precision only: in its precision, and in fp32."""

    own: MemoryPrediction
    """Prediction for the step as it was measured, which shows the error of the dry run."""
    fp32: MemoryPrediction
    """Prediction for the same step in fp32, which was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReferences:
    """References for one or several runs."""

    others: tuple[Run, ...] = ()
    """Measured runs that include, where they exist, the same cells in fp32 and without checkpointing."""
    forecasts: Mapping[str, Fp32Forecast] = field(default_factory=dict)
    """Predictions by the id of the run, for runs in low precision without a cell in fp32 that a dry run supports."""
