"""The fields that all stored records share, and those that all benchmarks of several cells share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Self, TypeVar

from steplab.records.environment import Environment
from steplab.records.failure import Outcome
from steplab.specs.step import StepSpec, describe
from steplab.units import counted_results

Cell = TypeVar("Cell", bound=Outcome)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Record(Outcome):
    """The head of a stored record; records.registry lists the kinds of records that there are."""

    id: str
    """Identity of the record: twelve hexadecimal digits."""
    created_utc: str
    """Time at which the measurement ended: ISO 8601, UTC."""
    steplab_version: str
    """Version of steplab that made the record."""
    name: str = ""
    """Name given by the user; in a sweep, the study's name."""
    tags: tuple[str, ...] = ()
    """Words that the user put on the record afterwards, to find it by."""
    comment: str = ""
    """Remark of the user, made afterwards."""
    environment: Environment | None = None
    """Hardware and software of the measurement; None if the process died before it reported them."""
    notes: tuple[str, ...] = ()
    """What was not measured and why, and what was chosen where the request left a choice."""
    schema: str
    """Format of this record: steplab.<kind>/<major>."""

    _repr_html_: ClassVar[Callable[["Record"], str]]
    """How notebooks show a record; the package sets it, because a record knows no presentation."""

    def __repr__(self) -> str:
        """One line for a prompt or a log: kind, id, what the record says, device and day."""
        outcome = self.failure and f"{self.failure.kind.replace('_', ' ')}: {self.failure.message}"
        told = (self.name, *self.in_short(), outcome, self.device_name, self.created_utc[:10])
        return f"<{type(self).__name__} {self.id}: {' · '.join(part for part in told if part)}>"

    def in_short(self) -> Iterator[str]:
        """Yield what the record says, in a few words each."""
        yield from ()

    @property
    def device_name(self) -> str | None:
        """Name of the device; None if no process reported it."""
        return self.environment.device.name if self.environment else None

    @property
    def sweep_id(self) -> str | None:
        """Identity of the sweep that the record belongs to; None for a record of its own."""
        return None

    @property
    def cell(self) -> StepSpec | None:
        """The step whose cell of that sweep this is; None: none."""
        return None

    def within(self, study_id: str) -> Self:
        """The same record as part of a study."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StepRecord(Record):
    """A record of one step, which may be a cell of a sweep."""

    study: str | None = None
    """Id of the sweep that it belongs to; None: none."""
    spec: StepSpec | None = None
    """The step as requested; None for a user's own loop, or for sums without a step."""

    @property
    def sweep_id(self) -> str | None:
        """Identity of the sweep that the record belongs to; None for a record of its own."""
        return self.study

    @property
    def cell(self) -> StepSpec | None:
        """The step whose cell of that sweep this is; None: none."""
        return self.spec

    def in_short(self) -> Iterator[str]:
        """Yield what the record says, in a few words each."""
        if self.spec:
            yield describe(self.spec)

    def within(self, study_id: str) -> Self:
        """The same record as part of a study."""
        return replace(self, study=study_id)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MachineRecord(Record):
    """A record of a machine rather than of one step, which may be part of a study."""

    part_of: str | None = None
    """Id of the study that it is part of; None: none."""

    @property
    def sweep_id(self) -> str | None:
        """Identity of the study that the record belongs to; None for a record of its own."""
        return self.part_of

    def within(self, study_id: str) -> Self:
        """The same record as part of a study."""
        return replace(self, part_of=study_id)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Benchmark(MachineRecord, Generic[Cell]):
    """A record of several cells that were measured together, each with raw samples or a failure."""

    cells: tuple[Cell, ...] = ()
    """The cells in the order of the study; cells that were not reached before an interruption are missing."""

    @property
    def num_requested(self) -> int:
        """Number of cells in the study."""
        raise NotImplementedError

    @property
    def is_interrupted(self) -> bool:
        """Whether cells of the study are missing."""
        return len(self.cells) < self.num_requested

    @property
    def status(self) -> str:
        """ok if any cell is ok, otherwise the status of the first."""
        if any(cell.failure is None for cell in self.cells):
            return "ok"
        return self.cells[0].status if self.cells else "error"

    def in_short(self) -> Iterator[str]:
        """Yield what the record says, in a few words each."""
        yield counted_results(len(self.cells), "cell", sum(cell.failure is not None for cell in self.cells))
