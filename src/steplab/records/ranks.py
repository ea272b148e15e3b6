"""The measurements of one of several processes that run a step together."""

from dataclasses import dataclass

from steplab.records.memory import PeakMemory
from steplab.records.timing import PhaseSamples, find_phase


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSamples:
    """One rank's own times and memory; all ranks' samples are of the same steps."""

    rank: int
    """Number of the rank among all processes, from 0."""
    host: str
    """Name of the machine it ran on."""
    device_name: str
    """Name of its device."""
    back_to_back: tuple[PhaseSamples, ...]
    """Samples of each phase, including `step`, of measured steps that ran without a synchronisation between them."""
    peaks: tuple[PeakMemory, ...] = ()
    """Peak memory of each phase; empty on a device whose allocator keeps no count."""
    host_peak_bytes: int | None = None
    """Largest resident set of its process in bytes; None: not known."""

    def phase(self, name: str) -> PhaseSamples | None:
        """The samples of one phase; None if it was not measured."""
        return find_phase(self.back_to_back, name)

    def peak(self, phase: str) -> PeakMemory | None:
        """The peak memory of one phase; None if it was not measured."""
        return next((peak for peak in self.peaks if peak.phase == phase), None)
