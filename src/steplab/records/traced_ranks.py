"""Ranks of one run side by side: times, late arrivals at collectives, bandwidth by group.

Times are per step unless a field says otherwise. Clocks are aligned on the common ends of collectives.
"""

from dataclasses import dataclass

from steplab.records.profile import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRank:
    """One rank; compute, exposed and idle sum to the step, except for copies alone (HTA's temporal breakdown)."""

    rank: int
    step_s: float
    """Seconds from the steps' first work to their last, divided by their number."""
    compute_s: float
    """Seconds with a kernel other than a collective; copies do not count."""
    hidden_s: float
    """Seconds of communication during a kernel."""
    exposed_s: float
    """Seconds of communication without one."""
    idle_s: float
    """Seconds without any work."""
    num_last: int = 0
    """Collectives, in all steps, that it reached last."""
    late_s: float = 0.0
    """Seconds that the middle ranks wait for it, with nothing to compute."""
    timeline: Timeline | None = None
    """Its last step: computation on row 0, communication on row 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """A collective of the step, the same in every step."""

    collective: str
    group: str
    """Ranks or name of its process group; '': unknown."""
    number: int
    """Place among its kind and group in a step, from 0."""
    num_steps: int
    """Steps with it on two or more ranks."""
    last_rank: int
    late_s: float
    """Median seconds of this rank after the middle of the others."""
    transfer_s: float
    """Median seconds from the last arrival to the end."""
    exposed_s: float
    """Median seconds without computation, on the rank that waits least."""
    size_bytes: int
    """Bytes of the message; 0: unknown."""
    bus_bytes_per_s: float | None
    """Bus bandwidth from the last arrival on (costs.communication); None: unknown size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathPart:
    """A stretch of the last step's critical path."""

    rank: int
    what: str
    """work, up to the arrival at a collective; or the collective."""
    time_s: float
    """Its length in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRanks:
    """All ranks with traces."""

    num_steps: int
    ranks: tuple[TracedRank, ...]
    meetings: tuple[Meeting, ...]
    path: tuple[PathPart, ...]
    clock_error_s: float | None
    """Median difference in seconds between a collective's ends on aligned clocks; None: none found in two ranks."""

    @property
    def imbalance(self) -> float:
        """Longest compute time over the mean, minus 1."""
        mean_s = sum(rank.compute_s for rank in self.ranks) / len(self.ranks)
        return max(rank.compute_s for rank in self.ranks) / mean_s - 1 if mean_s else 0.0
