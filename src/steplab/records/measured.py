"""What a record measured, cell by cell, as samples and single values, which is how records of any kind are compared.

The function that makes the cells of a kind is registered with it, in records.registry.
"""

from dataclasses import dataclass
from typing import Literal

from steplab.records.timing import PhaseSamples
from steplab.specs.step_fields import Scalar

Group = Literal["time", "phase", "speed", "memory", "category", "kernels", "communication"]
"""time, memory: the headline figures. phase: parts of a step. speed: rates made of a time. category: memory at the peak
by owner. kernels, communication: times in a profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredFigure:
    """One figure of a cell."""

    name: str
    """The figure in words: step time, forward, peak allocated."""
    group: Group
    """The group that it is shown in."""
    unit: str
    """Unit of the values: s, bytes, tokens/s, FLOP/s, B/s or share."""
    samples: tuple[float, ...]
    """Raw samples in the order of time, or a single value."""
    decides: bool = False
    """Whether a comparison is decided by it: the headline time, or the peak memory; more is worse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCell:
    """One step, or one cell of a benchmark."""

    key: dict[str, Scalar]
    """What was measured, field by field; cells of equal keys are alike."""
    label: str
    """The cell in words; empty if the record has no other."""
    figures: tuple[MeasuredFigure, ...] = ()
    """The figures that there are; none for a failure."""
    failure: str | None = None
    """Why it has no figures; None: it has."""


def of_phase(phase: PhaseSamples) -> MeasuredFigure:
    """The time of a step, or of one of its phases."""
    whole = phase.phase == "step"
    return MeasuredFigure(
        name="step time" if whole else phase.phase,
        group="time" if whole else "phase",
        unit="s",
        samples=phase.best_s,
        decides=whole,
    )
