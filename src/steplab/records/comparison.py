"""Differences between two sets of samples, between two sets of records, and of similar runs over time."""

from dataclasses import dataclass
from typing import Literal

from steplab.records.figure import Group
from steplab.specs.step_fields import Scalar
from steplab.units import counted

Decision = Literal["higher", "lower", "same", "not higher", "undecided"]
"""higher, lower: B differs from A by more than the threshold. same: by less. not higher: lower or the same. undecided:
the samples cannot decide if B is higher.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Median of B over median of A, with its uncertainty."""

    a: float
    b: float
    num_a: int
    num_b: int
    ratio: float
    """b / a; for alternating runs, after removing slowdowns common to both."""
    low: float | None
    """Lower end of the 95 % bootstrap interval; None: too few samples."""
    high: float | None
    p: float | None
    """Mann-Whitney probability of ranks this far apart if A equals B; None: too few samples."""
    threshold: float
    """Smallest difference that matters, as a share: 0.01 for 1 %."""
    decision: Decision
    more: int | None = None
    """If undecided: further samples or turns per side that would decide. None: too many, or the ratio is near the
    threshold, so no number decides.
    """
    why: str = ""
    """Reason for a weaker decision than the interval suggests; empty: none."""

    @property
    def exceeds(self) -> bool | None:
        """True if B exceeds A by more than the threshold; None: undecided."""
        return None if self.decision == "undecided" else self.decision == "higher"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlike:
    field: str
    a: Scalar
    b: Scalar

    @property
    def values(self) -> str:
        """'25 in A, 50 in B', or '25 in A only' where B has none."""
        sides = [(value, side) for value, side in ((self.a, "A"), (self.b, "B")) if value is not None]
        told = [f"{value:g} in {side}" if isinstance(value, float) else f"{value} in {side}" for value, side in sides]
        return ", ".join(told) + (" only" if len(told) == 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedFigure:
    cell: str
    """Cell of a study or benchmark; empty: each side has one."""
    name: str
    group: Group
    unit: str
    decides: bool
    a: float
    b: float
    ratio: Ratio | None
    """b / a with its uncertainty; None: single values, without an interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCount:
    """Calls of a kernel in one step."""

    name: str
    calls: float
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChange:
    """Device time of one part of the model in one phase, per profiled step."""

    cell: str
    phase: str
    """forward, backward, optimizer, or outside."""
    range: str
    """Part of the model; empty: unknown."""
    category: str = ""
    a: tuple[KernelCount, ...]
    """Kernels of A, longest first."""
    b: tuple[KernelCount, ...]

    @property
    def a_s(self) -> float:
        return sum(kernel.time_s for kernel in self.a)

    @property
    def b_s(self) -> float:
        return sum(kernel.time_s for kernel in self.b)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBytes:
    dtype: str | None
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChange:
    """Tensors of one shape and part of the model with different bytes at the peaks of A and B."""

    cell: str
    category: str
    """Memory category, as in records.memory_profile."""
    module: str
    """Module that made them, without layer numbers; empty: none or unknown."""
    op: str
    """Operator that made them in B, else in A; empty: unknown."""
    shape: tuple[int, ...] | None
    a: tuple[TensorBytes, ...]
    b: tuple[TensorBytes, ...]

    @property
    def change_bytes(self) -> int:
        return sum(held.num_bytes for held in self.b) - sum(held.num_bytes for held in self.a)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    told: str
    """The request: an id, name, tag, study, file or revision."""
    ids: tuple[str, ...]
    commits: tuple[str, ...] = ()
    """Commits of their working directories; empty: unknown."""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Comparison:
    """Two records or sets of records, compared cell by cell."""

    a: Side
    b: Side
    figures: tuple[ComparedFigure, ...]
    """Figures of both sides, in the order of A's cells."""
    kernels: tuple[KernelChange, ...] = ()
    """Changes of device time, largest first."""
    memory: tuple[MemoryChange, ...] = ()
    """Changes of memory at the peak, largest first."""
    allowed: tuple[Unlike, ...] = ()
    failed: tuple[str, ...] = ()
    in_turns: bool = False
    """True if the runs alternated; their step times then pair up turn by turn."""
    can_run_again: bool = True
    """False for recorded loops and benchmarks, which `steplab ab` cannot measure again."""
    doubts: tuple[str, ...] = ()
    """Reasons to doubt the times, as sentences; intervals are widened to the spread of starts on such machines."""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        ratios = [f"{figure.name} {figure.ratio.ratio:.3f}×" for figure in self.deciding[:3] if figure.ratio]
        more = [f"{len(self.deciding) - 3} more figures"] if len(self.deciding) > 3 else []
        told = ", ".join([self.outcome, *ratios, *more])
        return f"<{type(self).__name__} of {self.b.told} against {self.a.told}: {told}>"

    @property
    def deciding(self) -> tuple[ComparedFigure, ...]:
        return tuple(figure for figure in self.figures if figure.decides and figure.ratio)

    @property
    def regressions(self) -> tuple[ComparedFigure, ...]:
        """Largest ratio first."""
        found = [figure for figure in self.deciding if figure.ratio and figure.ratio.exceeds]
        return tuple(sorted(found, key=lambda figure: -(figure.ratio.ratio if figure.ratio else 0)))

    @property
    def undecided(self) -> tuple[ComparedFigure, ...]:
        return tuple(figure for figure in self.deciding if figure.ratio and figure.ratio.exceeds is None)

    @property
    def outcome(self) -> Literal["regression", "undecided", "fine"]:
        """regression: a figure exceeds the threshold, or a cell fails. undecided: one may, or nothing decides."""
        if self.regressions or self.failed:
            return "regression"
        return "undecided" if self.undecided or not self.deciding else "fine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The runs of a commit; without a commit, one run."""

    created_utc: str
    commit: str | None
    ids: tuple[str, ...]
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangePoint:
    index: int
    """Index of the first point of the new level."""
    before: float
    after: float
    p: float
    """Probability of a change this clear if the order meant nothing."""

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Series:
    """The history of one step on one device."""

    label: str
    metric: str
    """Name in rows; it ends in the unit."""
    points: tuple[Point, ...]
    changes: tuple[ChangePoint, ...]

    def __repr__(self) -> str:
        told = f"{counted(len(self.points), 'point')}, {counted(len(self.changes), 'change')} of level"
        return f"<{type(self).__name__} {self.metric} of {self.label}: {told}>"
