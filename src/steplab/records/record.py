"""Fields common to all stored records and to all benchmarks.

Decoding checks each value against its field's type. A class whose fields must agree has a method `problems`, which
`validation` calls.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Generic, Self, TypeVar

import msgspec

from steplab.records.environment import Environment
from steplab.records.failure import Outcome
from steplab.specs.step import StepSpec, describe
from steplab.units import counted_results

Problem = tuple[str, str]
"""Path of a field within the checked value, such as '.device_s[3]', and its fault."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
"""Whole number of at least 1; decoding refuses others."""


def one_of(names: Sequence[str]) -> msgspec.Meta:
    """Constraint for Annotated: decoding refuses a text that is none of these names."""
    return msgspec.Meta(pattern=f"^({'|'.join(map(re.escape, names))})$")


def known(path: str, value: str, names: Sequence[str] | set[str]) -> Iterator[Problem]:
    if value not in names:
        yield path, f"'{value[:64]}' is unknown; it must be one of {', '.join(sorted(names))}"


def as_long(path: str, column: Sequence[object], length: int, other: str) -> Iterator[Problem]:
    if len(column) != length:
        yield path, f"has {len(column)} entries, but {other} has {length}"


def numbered(path: str, numbers: Sequence[int], expected: int | None = None) -> Iterator[Problem]:
    """Yield a problem if ranks are missing or out of order."""
    if list(numbers) != list(range(len(numbers))):
        yield path, f"must be ranks 0 to {len(numbers) - 1} in order, not {', '.join(map(str, numbers[:8]))}"
    elif numbers and expected is not None and len(numbers) != expected:
        yield path, f"has {len(numbers)} ranks, but {expected} took part"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    rank: int
    host: str
    device: str
    """Device name, such as 'cuda:1 NVIDIA H200'."""


Cell = TypeVar("Cell", bound=Outcome)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Record(Outcome):
    """Base of stored records; records.registry lists its subclasses."""

    id: str
    """Twelve hexadecimal digits."""
    created_utc: str
    """End of the measurement: ISO 8601, UTC."""
    steplab_version: str
    name: str = ""
    """Name that you chose, or the study's name in a sweep."""
    tags: tuple[str, ...] = ()
    comment: str = ""
    environment: Environment | None = None
    """Hardware and software; None: the process died before it could report them."""
    notes: tuple[str, ...] = ()
    """Missing data with reasons, and choices that steplab made."""
    schema: str
    """Format: steplab.<kind>/<major>."""

    _repr_html_: ClassVar[Callable[["Record"], str]]
    """HTML for notebooks. The package assigns it, because records import no report code."""

    def __repr__(self) -> str:
        """One line: kind, id, contents, device and day."""
        outcome = self.failure and f"{self.failure.kind.replace('_', ' ')}: {self.failure.message}"
        told = (self.name, *self.in_short(), outcome, self.device_name, self.created_utc[:10])
        return f"<{type(self).__name__} {self.id}: {' · '.join(part for part in told if part)}>"

    def in_short(self) -> Iterator[str]:
        yield from ()

    @property
    def device_name(self) -> str | None:
        return self.environment.device.name if self.environment else None

    @property
    def sweep_id(self) -> str | None:
        return None

    @property
    def cell(self) -> StepSpec | None:
        """Spec of the step that the record measures, by which a sweep identifies its cell."""
        return None

    def within(self, study_id: str) -> Self:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StepRecord(Record):
    study: str | None = None
    spec: StepSpec | None = None
    """Requested step; None for your own loop, or for an audit of sums alone (records.numerics)."""

    @property
    def sweep_id(self) -> str | None:
        return self.study

    @property
    def cell(self) -> StepSpec | None:
        return self.spec

    def in_short(self) -> Iterator[str]:
        if self.spec:
            yield describe(self.spec)

    def within(self, study_id: str) -> Self:
        return replace(self, study=study_id)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MachineRecord(Record):
    part_of: str | None = None

    @property
    def sweep_id(self) -> str | None:
        return self.part_of

    def within(self, study_id: str) -> Self:
        return replace(self, part_of=study_id)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Benchmark(MachineRecord, Generic[Cell]):
    """Record of several cells measured together; each has raw samples or a failure."""

    cells: tuple[Cell, ...] = ()
    """Measured cells in the study's order; an interruption omits the later ones."""

    @property
    def num_requested(self) -> int:
        raise NotImplementedError

    @property
    def is_interrupted(self) -> bool:
        return len(self.cells) < self.num_requested

    @property
    def status(self) -> str:
        """ok if any cell is ok, else the first cell's status."""
        if any(cell.failure is None for cell in self.cells):
            return "ok"
        return self.cells[0].status if self.cells else "error"

    def in_short(self) -> Iterator[str]:
        yield counted_results(len(self.cells), "cell", sum(cell.failure is not None for cell in self.cells))
