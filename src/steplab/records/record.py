"""What every stored record has, and what every benchmark of several cells has besides."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from steplab.records.environment import Environment
from steplab.records.failure import Outcome
from steplab.specs.step import StepSpec

Cell = TypeVar("Cell", bound=Outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record(Outcome):
    """The head of a stored record; records.registry lists the kinds of records that there are."""

    id: str
    """Twelve hexadecimal digits."""
    created_utc: str
    """When the measurement ended: ISO 8601, UTC."""
    steplab_version: str
    """Version of steplab that made the record."""
    name: str = ""
    """What the user called it; in a sweep, the study's name."""
    environment: Environment | None = None
    """Where it ran; None if the process died before it could say."""
    notes: tuple[str, ...] = ()
    """What was not measured and why, what was chosen where the request left it open, in words."""
    schema: str
    """Format of this record: steplab.<kind>/<major>."""

    @property
    def device_name(self) -> str | None:
        """What the device is called; None if no process could say."""
        return self.environment.device.name if self.environment else None

    @property
    def sweep_id(self) -> str | None:
        """Identity of the sweep that the record belongs to; None for a record of its own."""
        return None

    @property
    def cell(self) -> StepSpec | None:
        """The step whose cell of that sweep this is; None: none."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord(Record):
    """A record of one step, which may be a cell of a sweep."""

    study: str | None = None
    """Identity of the sweep that it belongs to; None: none."""
    spec: StepSpec | None = None
    """What was asked; None for a user's own loop, or for sums on a device alone."""

    @property
    def sweep_id(self) -> str | None:
        """Identity of the sweep that the record belongs to; None for a record of its own."""
        return self.study

    @property
    def cell(self) -> StepSpec | None:
        """The step whose cell of that sweep this is; None: none."""
        return self.spec


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark(Record, Generic[Cell]):
    """A record of several cells that were measured together, each with raw samples or a failure."""

    cells: tuple[Cell, ...] = ()
    """In the order of the study; cells that an interruption left out are missing."""

    @property
    def status(self) -> str:
        """ok if any cell is, else what became of the first."""
        if any(cell.failure is None for cell in self.cells):
            return "ok"
        return self.cells[0].status if self.cells else "error"
