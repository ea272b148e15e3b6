"""Ceilings of a machine, measured: what a CPU or an unlisted GPU reaches, for which no data sheet is borrowed."""

from dataclasses import dataclass

from steplab.records.environment import Environment
from steplab.records.record import Record

CEILINGS_SCHEMA = "steplab.ceilings/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """One measured rate."""

    name: str
    """matmul or copy."""
    dtype: str | None
    """Data type of a matmul; None for a copy."""
    unit: str
    """FLOP/s, or B/s (bytes read plus bytes written)."""
    work: float
    """FLOPs or bytes of one repeat."""
    seconds: tuple[float, ...]
    """Raw time of each repeat."""

    @property
    def best_per_s(self) -> float:
        """Rate of the fastest repeat: a ceiling is what the machine can do when nothing disturbs it."""
        return self.work / min(self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings(Record):
    """What `steplab doctor` measured on one device."""

    environment: Environment
    """The machine."""
    ceilings: tuple[Ceiling, ...]
    """The rates."""
    schema: str = CEILINGS_SCHEMA
    """Format of this record."""

    def matmul(self, dtype: str) -> Ceiling | None:
        """The measured matmul ceiling of a data type."""
        return next((c for c in self.ceilings if c.name == "matmul" and c.dtype == dtype), None)
