"""What one of several processes measured of the steps that they took together."""

from dataclasses import dataclass

from steplab.records.memory import PeakMemory
from steplab.records.timing import PhaseSamples, find_phase


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSamples:
    """One rank's own clocks and memory; its samples are of the same steps as every other rank's."""

    rank: int
    """Its place among all processes, from 0."""
    host: str
    """Name of the machine it ran on."""
    device_name: str
    """What its device is called."""
    back_to_back: tuple[PhaseSamples, ...]
    """Measured steps run without a synchronisation between them, a phase an entry, `step` among them."""
    peaks: tuple[PeakMemory, ...] = ()
    """A peak a phase; empty on a device whose allocator keeps no count."""
    host_peak_bytes: int | None = None
    """Largest resident set of its process."""

    def phase(self, name: str) -> PhaseSamples | None:
        """Its samples of one phase."""
        return find_phase(self.back_to_back, name)

    def peak(self, phase: str) -> PeakMemory | None:
        """Its peak of one phase, if it was measured."""
        return next((peak for peak in self.peaks if peak.phase == phase), None)
