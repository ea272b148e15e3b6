"""Measured peaks of a machine, for a CPU or an unknown GPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from steplab.records.disturbances import busy_machine
from steplab.records.environment import DeviceInfo, Environment
from steplab.records.figure import MeasuredCell, MeasuredFigure
from steplab.records.record import MachineRecord, Problem
from steplab.records.rows import Row, head, software

_SCATTERED = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    name: str
    """matmul or copy."""
    dtype: str | None
    """Data type of a matmul; None for a copy."""
    unit: Literal["FLOP/s", "B/s"]
    """FLOP/s, or B/s (bytes read plus written)."""
    work: float
    """FLOPs or bytes per repeat."""
    seconds: tuple[float, ...]

    @property
    def best_per_s(self) -> float:
        """FLOPs or bytes per second of the fastest repeat, which other work disturbed least."""
        return self.work / min(self.seconds)

    @property
    def scatters(self) -> bool:
        """True if the median repeat took more than 1.5 times as long as the fastest."""
        return median(self.seconds) > _SCATTERED * min(self.seconds)

    def problems(self) -> Iterator[Problem]:
        if not self.seconds or not all(self.seconds):
            yield ".seconds", "has no samples, or a sample without time"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Ceilings(MachineRecord):
    """Result of `steplab doctor` on one device."""

    environment: Environment
    ceilings: tuple[Ceiling, ...]
    schema: str = "steplab.ceilings/1"

    def matmul(self, dtype: str) -> Ceiling | None:
        return next((c for c in self.ceilings if c.name == "matmul" and c.dtype == dtype), None)

    def serves(self, device: DeviceInfo) -> bool:
        own = self.environment.device
        return (own.name, own.threads) == (device.name, device.threads)

    @property
    def doubt(self) -> str | None:
        """Why the peaks may be too low; MFU then ignores them. None: no reason."""
        if busy := busy_machine(self.environment):
            return busy.text
        wide = [c.dtype or c.name for c in self.ceilings if c.scatters]
        return f"Repeats of one product or copy took 1.5 times as long as others ({', '.join(wide)})." if wide else None


def ceilings_row(record: Ceilings, kind: str, figures: object = ()) -> Row:
    row = head(record, kind) | {"device": record.device_name, "status": record.status} | software(record)
    for ceiling in record.ceilings:
        unit = "flops_per_s" if ceiling.unit == "FLOP/s" else "bytes_per_s"
        row["_".join(filter(None, (ceiling.name, ceiling.dtype, unit)))] = ceiling.best_per_s
    return row


def ceilings_cells(record: Ceilings) -> tuple[MeasuredCell, ...]:
    return tuple(
        MeasuredCell(
            key={"ceiling": ceiling.name, "dtype": ceiling.dtype, "work": ceiling.work},
            label=" ".join(filter(None, (ceiling.name, ceiling.dtype))),
            figures=(MeasuredFigure(name="time", group="time", unit="s", samples=ceiling.seconds, decides=True),),
        )
        for ceiling in record.ceilings
    )
