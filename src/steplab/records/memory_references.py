"""Runs and predictions to compare a run's memory with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp32Forecast:
    """Dry-run predictions for a step measured only in low precision: in its precision, and in fp32."""

    own: MemoryPrediction
    """Prediction for the measured step, which shows the dry run's error."""
    fp32: MemoryPrediction
    """Prediction for the same step in fp32, which was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReferences:
    """References for one or several runs."""

    others: tuple[Run, ...] = ()
    """Measured runs, among them the same cells in fp32 and without checkpointing, if any."""
    forecasts: Mapping[str, Fp32Forecast] = field(default_factory=dict)
    """Predictions by run id, for low-precision runs without an fp32 cell that a dry run supports."""
