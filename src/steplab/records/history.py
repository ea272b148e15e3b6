"""One figure of similar runs over time, with changes of level."""

from dataclasses import dataclass

from steplab.units import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The runs of a commit; without a commit, one run."""

    created_utc: str
    """End of the last run."""
    commit: str | None
    """Commit of the working directory; None: unknown."""
    ids: tuple[str, ...]
    """Ids of the runs."""
    value: float
    """Median of their figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangePoint:
    """A change of the figure's level."""

    index: int
    """Index of the first point of the new level."""
    before: float
    """Median before it."""
    after: float
    """Median from it on."""
    p: float
    """Probability of a change this clear if the order meant nothing."""

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Series:
    """The history of one step on one device."""

    label: str
    """Step and device in words."""
    metric: str
    """Name in rows; it ends in the unit."""
    points: tuple[Point, ...]
    """Oldest first."""
    changes: tuple[ChangePoint, ...]
    """In the order of the points."""

    def __repr__(self) -> str:
        told = f"{counted(len(self.points), 'point')}, {counted(len(self.changes), 'change')} of level"
        return f"<{type(self).__name__} {self.metric} of {self.label}: {told}>"
