"""How two sets of samples, and two records or sets of records, differ."""

from dataclasses import dataclass
from typing import Literal

from steplab.records.measured import Group
from steplab.records.rows import Scalar

Decision = Literal["higher", "lower", "same", "not higher", "undecided"]
"""higher, lower: B differs from A by more than the threshold. same: by no more than that. not higher: B is lower or the
same. undecided: the samples do not tell whether B is higher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """The median of B over the median of A, with what the samples say about it."""

    a: float
    """Median of A, in the samples' unit."""
    b: float
    """Median of B, in the same unit."""
    num_a: int
    """Number of samples of A."""
    num_b: int
    """Number of samples of B."""
    ratio: float
    """b / a; in turns, after what slowed both sides was divided out."""
    low: float | None
    """Lower end of the 95 % bootstrap interval of the ratio; None: too few samples for one."""
    high: float | None
    """Upper end of the interval; None: too few samples for one."""
    p: float | None
    """Probability of ranks at least this far apart if A and B are alike (Mann and Whitney); None: too few samples."""
    threshold: float
    """Smallest difference that matters, as a share: 0.01 for 1 %."""
    decision: Decision
    """What the interval and the test allow to be said."""
    more: int | None = None
    """If undecided: about how many further samples, or turns, of each side would decide; None: too many to be worth
    taking, or the ratio is about the threshold itself, which no number decides."""
    why: str = ""
    """Why the decision says less than the interval does, in words; empty: it says as much."""

    @property
    def exceeds(self) -> bool | None:
        """Whether B is higher than A by more than the threshold; None if that is undecided."""
        return None if self.decision == "undecided" else self.decision == "higher"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlike:
    """A field in which two records differ, although they are compared."""

    field: str
    """Name of the field."""
    a: Scalar
    """Its value in A; None: it has none."""
    b: Scalar
    """Its value in B; None: it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedFigure:
    """One figure of A beside that of B."""

    cell: str
    """The cell of a study or benchmark; empty if each side has a single one."""
    name: str
    """The figure in words."""
    group: Group
    """The group that it is shown in."""
    unit: str
    """Unit of both values."""
    decides: bool
    """Whether the comparison is decided by it."""
    a: float
    """Median of A."""
    b: float
    """Median of B."""
    ratio: Ratio | None
    """What can be said of b / a; None: a single value of each, which has no interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCount:
    """The calls of one kernel in one step."""

    name: str
    """Name of the kernel."""
    calls: float
    """Number of calls per step."""
    time_s: float
    """Seconds per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChange:
    """Device time of one part of the model in one phase, in A and in B, per profiled step."""

    cell: str
    """The cell; empty if each side has a single one."""
    phase: str
    """Phase of the step."""
    range: str
    """Part of the model; empty if the profiles do not tell."""
    category: str = ""
    """Category of the kernels, where the profiles do not tell the part of the model."""
    a: tuple[KernelCount, ...]
    """Kernels of A, the longest first."""
    b: tuple[KernelCount, ...]
    """Kernels of B, the longest first."""

    @property
    def a_s(self) -> float:
        """Seconds of the part in a step of A."""
        return sum(kernel.time_s for kernel in self.a)

    @property
    def b_s(self) -> float:
        """Seconds of the part in a step of B."""
        return sum(kernel.time_s for kernel in self.b)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBytes:
    """Bytes at the peak of like tensors."""

    dtype: str | None
    """Their number format; None: not known."""
    num_bytes: int
    """Bytes of all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChange:
    """Tensors of one shape and part of the model that hold a different number of bytes at the peaks of A and B."""

    cell: str
    """The cell; empty if each side has a single one."""
    category: str
    """Category of the memory, as in records.memory_profile."""
    module: str
    """Module that made them, with layer numbers replaced; empty: none, or not known."""
    op: str
    """Operator that made them in B, or in A if B has none; empty: not known."""
    shape: tuple[int, ...] | None
    """Shape of each; None: not known."""
    a: tuple[TensorBytes, ...]
    """Those of A; empty: none."""
    b: tuple[TensorBytes, ...]
    """Those of B; empty: none."""

    @property
    def change_bytes(self) -> int:
        """Bytes that B has more than A."""
        return sum(held.num_bytes for held in self.b) - sum(held.num_bytes for held in self.a)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side of a comparison."""

    told: str
    """What was asked for: an id, a name, a tag, a study, a file or a revision."""
    ids: tuple[str, ...]
    """The records that this is."""
    commits: tuple[str, ...] = ()
    """Commits of the working directories in which they were measured; empty: none known."""
    names: tuple[str, ...] = ()
    """The names that they have, each once; empty: none has one."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Comparison:
    """Two records, or two sets of records, cell by cell."""

    a: Side
    """What is compared with."""
    b: Side
    """What is compared."""
    figures: tuple[ComparedFigure, ...]
    """The figures that both have, in the order of A's cells."""
    kernels: tuple[KernelChange, ...] = ()
    """Where the device's time changed, the largest change first."""
    memory: tuple[MemoryChange, ...] = ()
    """What holds more or less memory at the peak, the largest change first."""
    allowed: tuple[Unlike, ...] = ()
    """Fields in which they differ, and were allowed to."""
    failed: tuple[str, ...] = ()
    """Cells that failed in B and not in A, each with the reason."""
    in_turns: bool = False
    """Whether the runs took turns on the device; their step times then belong together, turn by turn."""
    can_run_again: bool = True
    """Whether `steplab ab` can measure A and B again, in turns: it cannot where one is a recorded loop or a
    benchmark."""
    doubts: tuple[str, ...] = ()
    """Reasons to doubt the times, in whole sentences; the intervals are as wide as starts on such machines differ."""
    notes: tuple[str, ...] = ()
    """What is not compared, and why."""

    def __repr__(self) -> str:
        ratios = [f"{figure.name} {figure.ratio.ratio:.3f}×" for figure in self.deciding[:3] if figure.ratio]
        more = [f"{len(self.deciding) - 3} more figures"] if len(self.deciding) > 3 else []
        told = ", ".join([self.outcome, *ratios, *more])
        return f"<{type(self).__name__} of {self.b.told} against {self.a.told}: {told}>"

    @property
    def deciding(self) -> tuple[ComparedFigure, ...]:
        """The figures by which the comparison is decided."""
        return tuple(figure for figure in self.figures if figure.decides and figure.ratio)

    @property
    def regressions(self) -> tuple[ComparedFigure, ...]:
        """The deciding figures that B has more of than the threshold allows, the largest ratio first."""
        found = [figure for figure in self.deciding if figure.ratio and figure.ratio.exceeds]
        return tuple(sorted(found, key=lambda figure: -(figure.ratio.ratio if figure.ratio else 0)))

    @property
    def undecided(self) -> tuple[ComparedFigure, ...]:
        """The deciding figures of which it is not known whether B has more of them than the threshold allows."""
        return tuple(figure for figure in self.deciding if figure.ratio and figure.ratio.exceeds is None)

    @property
    def outcome(self) -> Literal["regression", "undecided", "fine"]:
        """regression: a figure is worse by more than the threshold, or a cell fails. undecided: one may be, or there
        is nothing to decide by."""
        if self.regressions or self.failed:
            return "regression"
        return "undecided" if self.undecided or not self.deciding else "fine"
