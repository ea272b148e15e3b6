"""One figure of like runs over time, and where its level changed."""

from dataclasses import dataclass

from steplab.units import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The runs of one commit; without a commit, one run."""

    created_utc: str
    """When the last of them ended."""
    commit: str | None
    """Commit of the working directory; None: not known."""
    ids: tuple[str, ...]
    """The runs."""
    value: float
    """Median of their figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangePoint:
    """A place from which the figure has another level."""

    index: int
    """Index of the first point of the new level."""
    before: float
    """Median of the level before it."""
    after: float
    """Median of the level from it on."""
    p: float
    """Probability of a change at least this clear if the order of the points meant nothing."""

    @property
    def ratio(self) -> float:
        """after / before."""
        return self.after / self.before


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Series:
    """The history of one step on one device."""

    label: str
    """The step and the device in words."""
    metric: str
    """Name of the figure in rows; it ends in the unit."""
    points: tuple[Point, ...]
    """Oldest first."""
    changes: tuple[ChangePoint, ...]
    """In the order of the points."""

    def __repr__(self) -> str:
        told = f"{counted(len(self.points), 'point')}, {counted(len(self.changes), 'change')} of level"
        return f"<{type(self).__name__} {self.metric} of {self.label}: {told}>"
