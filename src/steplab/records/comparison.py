"""Comparisons: of two sets of samples, of two sets of records, and of one step over time."""

from dataclasses import dataclass
from typing import Literal

from steplab.records.figure import Group
from steplab.specs.step_fields import Scalar
from steplab.units import counted

Decision = Literal["higher", "lower", "same", "not higher", "undecided"]
"""B against A. higher, lower: by more than the threshold. same: by less. not higher: lower or same. undecided: the
samples do not show if B is higher.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Median of B over median of A, with its uncertainty."""

    a: float
    b: float
    num_a: int
    num_b: int
    ratio: float
    """b / a; if the runs alternated, corrected for slowdowns common to both."""
    low: float | None
    """Lower end of the 95 % bootstrap interval; None: too few samples."""
    high: float | None
    p: float | None
    """p-value of the Mann-Whitney test that A and B have equal distributions; None: too few samples."""
    threshold: float
    """Smallest relative difference that matters: 0.01 for 1 %."""
    decision: Decision
    more: int | None = None
    """Further samples or turns per side that would decide. None: too many, or the ratio is too near the threshold."""
    why: str = ""
    """Reason why `decision` claims less than the interval would allow; empty: it does not."""

    @property
    def exceeds(self) -> bool | None:
        """True if B exceeds A by more than the threshold; None if undecided."""
        return None if self.decision == "undecided" else self.decision == "higher"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlike:
    field: str
    a: Scalar
    b: Scalar

    @property
    def values(self) -> str:
        """Both values as text: '25 in A, 50 in B', or '25 in A only'."""
        sides = [(value, side) for value, side in ((self.a, "A"), (self.b, "B")) if value is not None]
        told = [f"{value:g} in {side}" if isinstance(value, float) else f"{value} in {side}" for value, side in sides]
        return ", ".join(told) + (" only" if len(told) == 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedFigure:
    cell: str
    """Label of the compared cell; empty: each side has only one."""
    name: str
    group: Group
    unit: str
    decides: bool
    a: float
    b: float
    ratio: Ratio | None
    """b / a with its uncertainty; None: each side has one value, hence no interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCount:
    """Calls of a kernel in one step."""

    name: str
    calls: float
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChange:
    """Kernels of one model part and phase in A and in B, per profiled step."""

    cell: str
    phase: str
    """forward, backward, optimizer, or outside."""
    range: str
    """Model part that launched the kernels; empty: unknown."""
    category: str = ""
    a: tuple[KernelCount, ...]
    """Kernels of A, longest time first."""
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
    """Change in bytes at the peak of tensors of one shape and model part."""

    cell: str
    category: str
    """One of records.memory_profile.MEMORY_CATEGORIES."""
    module: str
    """Module that allocated the tensors, without layer numbers; empty: none or unknown."""
    op: str
    """Operator that allocated the tensors in B, else in A; empty: unknown."""
    shape: tuple[int, ...] | None
    a: tuple[TensorBytes, ...]
    b: tuple[TensorBytes, ...]

    @property
    def change_bytes(self) -> int:
        return sum(held.num_bytes for held in self.b) - sum(held.num_bytes for held in self.a)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    told: str
    """The side as requested: an id, name, tag, study, file or revision."""
    ids: tuple[str, ...]
    commits: tuple[str, ...] = ()
    """Git commits of the records; empty: unknown."""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Comparison:
    """Comparison of two records or sets of records, cell by cell."""

    a: Side
    b: Side
    figures: tuple[ComparedFigure, ...]
    """Figures that both sides have, in the order of A's cells."""
    kernels: tuple[KernelChange, ...] = ()
    """Changes of device time, largest first."""
    memory: tuple[MemoryChange, ...] = ()
    """Changes of memory at the peak, largest first."""
    allowed: tuple[Unlike, ...] = ()
    failed: tuple[str, ...] = ()
    in_turns: bool = False
    """True if the runs alternated; samples of step time are then paired turn by turn."""
    can_run_again: bool = True
    """False if `steplab ab` cannot measure the sides again, such as recorded loops."""
    doubts: tuple[str, ...] = ()
    """Reasons to doubt the times. If there are any, intervals include the spread between processes on such machines."""
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
        """Deciding figures that exceed the threshold, largest ratio first."""
        found = [figure for figure in self.deciding if figure.ratio and figure.ratio.exceeds]
        return tuple(sorted(found, key=lambda figure: -(figure.ratio.ratio if figure.ratio else 0)))

    @property
    def undecided(self) -> tuple[ComparedFigure, ...]:
        return tuple(figure for figure in self.deciding if figure.ratio and figure.ratio.exceeds is None)

    @property
    def outcome(self) -> Literal["regression", "undecided", "fine"]:
        """regression: a figure exceeds the threshold, or a cell failed. undecided: one might, or none has a ratio."""
        if self.regressions or self.failed:
            return "regression"
        return "undecided" if self.undecided or not self.deciding else "fine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Runs of one commit; a run without a commit has its own point."""

    created_utc: str
    commit: str | None
    ids: tuple[str, ...]
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangePoint:
    index: int
    """Index in `points` of the first point after the change."""
    before: float
    after: float
    p: float
    """Probability of a change at least this clear in a random order of the points."""

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Series:
    """History of one step's figure on one device."""

    label: str
    metric: str
    """Key of the figure in rows, such as step_time_s."""
    points: tuple[Point, ...]
    changes: tuple[ChangePoint, ...]

    def __repr__(self) -> str:
        told = f"{counted(len(self.points), 'point')}, {counted(len(self.changes), 'change')} of level"
        return f"<{type(self).__name__} {self.metric} of {self.label}: {told}>"
