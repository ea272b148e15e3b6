"""Measurements of any record as cells of samples, for comparison.

records.registry names the function that makes a kind's cells.
"""

from dataclasses import dataclass
from typing import Literal

from steplab.records.timing import PhaseSamples
from steplab.specs.step_fields import Scalar

Group = Literal["time", "phase", "speed", "memory", "category", "kernels", "communication"]
"""time, memory: headlines. phase: parts of a step. speed: rates from a time. category: memory at the peak by owner.
kernels, communication: times in a profile.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredFigure:
    """One figure of a cell."""

    name: str
    """Such as step time, forward, peak allocated."""
    group: Group
    """Its group in reports."""
    unit: str
    """s, bytes, tokens/s, FLOP/s, B/s or share."""
    samples: tuple[float, ...]
    """Raw samples in order of time, or one value."""
    decides: bool = False
    """True if it decides comparisons: headline time or peak memory; more is worse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCell:
    """One step, or one cell of a benchmark."""

    key: dict[str, Scalar]
    """Identity, field by field; cells with equal keys match."""
    label: str
    """The cell in words; empty: the only one."""
    figures: tuple[MeasuredFigure, ...] = ()
    """Figures; empty after a failure."""
    failure: str | None = None
    """Reason for missing figures; None: success."""


def of_phase(phase: PhaseSamples) -> MeasuredFigure:
    """The time of a step or of one phase."""
    whole = phase.phase == "step"
    return MeasuredFigure(
        name="step time" if whole else phase.phase,
        group="time" if whole else "phase",
        unit="s",
        samples=phase.best_s,
        decides=whole,
    )
