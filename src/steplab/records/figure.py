"""A figure of a record, declared once: rows, columns of tables and comparisons follow from it.

A comparison is of cells of samples; records.registry names the function that makes a kind's cells.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from steplab.records.failure import Outcome
from steplab.records.timing import PhaseSamples
from steplab.specs.step_fields import Scalar

Item = TypeVar("Item")
Cell = TypeVar("Cell", bound=Outcome)


Group = Literal["time", "phase", "speed", "memory", "category", "kernels", "communication"]
"""time, memory: headlines. phase: parts of a step. speed: rates from a time. category: memory at the peak by owner.
kernels, communication: times in a profile.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredFigure:
    name: str
    group: Group
    unit: str
    """s, bytes, tokens/s, FLOP/s, B/s or share."""
    samples: tuple[float, ...]
    """Raw samples in order of time, or one value."""
    decides: bool = False
    """True if it decides comparisons: headline time or peak memory; more is worse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCell:
    key: dict[str, Scalar]
    """Identity, field by field; cells with equal keys match."""
    label: str
    """The cell in words; empty: the only one."""
    figures: tuple[MeasuredFigure, ...] = ()
    failure: str | None = None


def of_phase(phase: PhaseSamples) -> MeasuredFigure:
    whole = phase.phase == "step"
    return MeasuredFigure(
        name="step time" if whole else phase.phase,
        group="time" if whole else "phase",
        unit="s",
        samples=phase.best_s,
        decides=whole,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure(Generic[Item]):
    key: str
    """Name in rows, JSON and CSV; ends in the unit, from which tables format it."""
    find: Callable[[Item], Scalar]
    header: str | None = None
    """Heading of its column; None: tables leave it out."""
    unit: str = ""
    """Name of the unit of tables (report.kit.quantities.UNITS), where `key` does not end in it."""
    is_words: bool = False
    wraps_from: int | None = None
    """Least width to which a terminal may wrap its words; None: 12."""
    folds: bool = False
    """True: a terminal without room puts its values below their rows, in the words of `shared`."""
    rank: int = 0
    """Order in which columns are dropped on a narrow terminal, the highest rank first; 0 is never dropped."""
    shared: str = ""
    """Words of a caption for a value that all rows share, with {} for the value; empty: it remains a column."""
    note: str = ""
    """Explanation below a table with the column, in whole sentences."""
    group: Group | None = None
    """Group among the figures of a comparison; None: it is not compared."""
    name: str = ""
    """Name in comparisons; empty: the header."""
    samples: Callable[[Item], Sequence[float]] | None = None
    """Raw samples for comparisons, in seconds; None: the single value."""
    decides: bool = False

    def measured(self, item: Item) -> MeasuredFigure | None:
        value = self.find(item)
        if self.group is None or not isinstance(value, int | float) or not value:
            return None
        return MeasuredFigure(
            name=self.name or self.header or self.key,
            group=self.group,
            unit="bytes" if self.key.endswith("_bytes") else "s",
            samples=tuple(self.samples(item)) if self.samples else (float(value),),
            decides=self.decides,
        )


def values(figures: Iterable[Figure[Item]], item: Item) -> dict[str, Scalar]:
    return {figure.key: figure.find(item) for figure in figures}


def measured_cell(cell: Cell, key: dict[str, Scalar], label: str, figures: Iterable[Figure[Cell]]) -> MeasuredCell:
    return MeasuredCell(
        key=key,
        label=label,
        figures=tuple(found for figure in figures if (found := figure.measured(cell))),
        failure=cell.failure.message if cell.failure else None,
    )
