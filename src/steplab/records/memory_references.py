"""What a run's memory is set against, to say why its peak is as high as it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp32Forecast:
    """What a dry run says of a step that was measured in low precision alone: of the step, and of the same in fp32."""

    own: MemoryPrediction
    """Of the step as it was measured, which shows how far off the dry run is."""
    fp32: MemoryPrediction
    """Of the step that nobody measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReferences:
    """Of one run or of several."""

    others: tuple[Run, ...] = ()
    """Measured runs, among which are the same cells in fp32, and without checkpointing, as far as there are any."""
    forecasts: Mapping[str, Fp32Forecast] = field(default_factory=dict)
    """By the runs' ids: of those in low precision without a cell in fp32, as far as a dry run is possible."""
