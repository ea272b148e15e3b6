"""Measurements of one of several processes of a step."""

from dataclasses import dataclass

from steplab.records.memory import PeakMemory
from steplab.records.timing import PhaseSamples, find_phase


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSamples:
    """One rank's times and memory; all ranks' samples are of the same steps."""

    rank: int
    """From 0, over all processes."""
    host: str
    device_name: str
    back_to_back: tuple[PhaseSamples, ...]
    """Samples of each phase, including `step`, of measured steps back to back."""
    peaks: tuple[PeakMemory, ...] = ()
    """Peak of each phase; empty without allocator counts."""
    host_peak_bytes: int | None = None
    """Largest resident set of its process in bytes; None: unknown."""

    def phase(self, name: str) -> PhaseSamples | None:
        """None: not measured."""
        return find_phase(self.back_to_back, name)

    def peak(self, phase: str) -> PeakMemory | None:
        """None: not measured."""
        return next((peak for peak in self.peaks if peak.phase == phase), None)
