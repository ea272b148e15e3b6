"""Declares each figure of a record once; rows, table columns and comparisons derive from it.

Comparisons match cells of samples, built by functions that records.registry names.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from steplab.records.failure import Outcome
from steplab.specs.step_fields import Scalar

Item = TypeVar("Item")
Cell = TypeVar("Cell", bound=Outcome)


Group = Literal["time", "phase", "speed", "memory", "category", "kernels", "communication"]
"""time, memory: main results. phase: parts of a step. speed: rates. category: memory at the peak. kernels,
communication: from a profile.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredFigure:
    name: str
    group: Group
    unit: str
    """s, bytes, tokens/s, FLOP/s, B/s or share."""
    samples: tuple[float, ...]
    """Raw samples in order, or a single value."""
    decides: bool = False
    """True if it decides a comparison; larger is worse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCell:
    key: dict[str, Scalar]
    """Comparisons match cells with equal field values."""
    label: str
    """Cell name for tables; empty: the record has one cell."""
    figures: tuple[MeasuredFigure, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure(Generic[Item]):
    key: str
    """Name in rows, JSON and CSV. Its ending is the unit, which selects the format in tables."""
    find: Callable[[Item], Scalar]
    header: str | None = None
    """Column heading; None: not shown in tables."""
    unit: str = ""
    """Unit's name in report.kit.quantities.UNITS, if `key` does not end in it."""
    is_words: bool = False
    wraps_from: int | None = None
    """Narrowest column to which a terminal may wrap its text; None: 12 characters."""
    folds: bool = False
    """True if a narrow terminal may show values below their rows, formatted by `shared`."""
    rank: int = 0
    """A narrow terminal drops the highest ranks first, and never 0."""
    shared: str = ""
    """Caption ({}: the value) that replaces the column if all rows have one value; empty: never replaced."""
    note: str = ""
    """Sentences below tables with this column."""
    group: Group | None = None
    """Group in comparisons; None: not compared."""
    name: str = ""
    """Name in comparisons; empty: `header`."""
    samples: Callable[[Item], Sequence[float]] | None = None
    """Raw samples in seconds, for comparisons; None: `find`'s value is compared."""
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
