"""Measured ceilings of a machine: the rates that a CPU or a GPU outside the catalogue reaches."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from steplab.records.disturbances import busy_machine
from steplab.records.environment import DeviceInfo, Environment
from steplab.records.measured import MeasuredCell, MeasuredFigure
from steplab.records.problems import Problem, known
from steplab.records.record import MachineRecord
from steplab.records.rows import Row, head, software

_SCATTERED = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """One measured rate."""

    name: str
    """What was measured: matmul or copy."""
    dtype: str | None
    """Data type of a matmul; None for a copy."""
    unit: str
    """Unit of the rate: FLOP/s, or B/s (bytes read plus bytes written)."""
    work: float
    """Number of FLOPs or bytes in one repeat."""
    seconds: tuple[float, ...]
    """Raw time of each repeat in seconds."""

    @property
    def best_per_s(self) -> float:
        """Rate of the fastest repeat, the one that other work on the machine disturbed least."""
        return self.work / min(self.seconds)

    @property
    def scatters(self) -> bool:
        """Whether half of the repeats took 1.5 times as long as the fastest, or more."""
        return median(self.seconds) > _SCATTERED * min(self.seconds)

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        if not self.seconds or not all(self.seconds):
            yield ".seconds", "has no samples, or one that took no time"
        yield from known(".unit", self.unit, ("FLOP/s", "B/s"))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Ceilings(MachineRecord):
    """What `steplab doctor` measured on one device."""

    environment: Environment
    """The machine and its software."""
    ceilings: tuple[Ceiling, ...]
    """The measured rates."""
    schema: str = "steplab.ceilings/1"
    """Format of this record."""

    def matmul(self, dtype: str) -> Ceiling | None:
        """The measured matmul ceiling of a data type."""
        return next((c for c in self.ceilings if c.name == "matmul" and c.dtype == dtype), None)

    def serves(self, device: DeviceInfo) -> bool:
        """Whether they are those of a device of this name, with as many threads."""
        own = self.environment.device
        return (own.name, own.threads) == (device.name, device.threads)

    @property
    def doubt(self) -> str | None:
        """Why they may be too low, as a sentence; MFU is not relative to such. None: nothing says so."""
        if busy := busy_machine(self.environment):
            return busy.text
        wide = [c.dtype or c.name for c in self.ceilings if c.scatters]
        return f"Repeats of one product or copy took 1.5 times as long as others ({', '.join(wide)})." if wide else None


def ceilings_row(record: Ceilings) -> Row:
    """The row of a set of ceilings: the device and each of its rates."""
    row = head(record, "doctor") | {"device": record.device_name, "status": record.status} | software(record)
    for ceiling in record.ceilings:
        unit = "flops_per_s" if ceiling.unit == "FLOP/s" else "bytes_per_s"
        row["_".join(filter(None, (ceiling.name, ceiling.dtype, unit)))] = ceiling.best_per_s
    return row


def ceilings_cells(record: Ceilings) -> tuple[MeasuredCell, ...]:
    """The ceilings as they are compared: the time of each repeat."""
    return tuple(
        MeasuredCell(
            key={"ceiling": ceiling.name, "dtype": ceiling.dtype, "work": ceiling.work},
            label=" ".join(filter(None, (ceiling.name, ceiling.dtype))),
            figures=(MeasuredFigure(name="time", group="time", unit="s", samples=ceiling.seconds, decides=True),),
        )
        for ceiling in record.ceilings
    )
