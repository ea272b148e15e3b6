"""The ranks of one run side by side: their time, who is late at which collective, and the bandwidth of each group.

All times are per step unless a field says otherwise. Clocks are aligned on collectives, which end together.
"""

from dataclasses import dataclass

from steplab.records.profile import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRank:
    """One rank; compute, exposed and idle sum to the step, but for copies that run alone (HTA's temporal breakdown)."""

    rank: int
    """Number of the rank."""
    step_s: float
    """Seconds from the first piece of work of the steps to the last, divided by their number."""
    compute_s: float
    """Seconds in which a kernel other than a collective ran; copies do not count."""
    hidden_s: float
    """Seconds of communication beside such a kernel."""
    exposed_s: float
    """Seconds of communication beside none."""
    idle_s: float
    """Seconds in which nothing ran."""
    num_last: int = 0
    """Number of collectives, in all steps, at which it arrived last."""
    late_s: float = 0.0
    """Seconds by which it was later at these than the ranks in the middle."""
    timeline: Timeline | None = None
    """Its last step: computation on row 0, communication on row 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """One collective of the step, the same in every step."""

    collective: str
    """The collective, such as all_reduce."""
    group: str
    """Ranks or name of its process group; '' if the traces do not say."""
    number: int
    """Its place among those of this kind and group in a step, from 0."""
    num_steps: int
    """Number of steps in which it was found in two ranks or more."""
    last_rank: int
    """Rank that came last most often."""
    late_s: float
    """Median seconds by which the last rank came after the ranks in the middle."""
    transfer_s: float
    """Median seconds from the arrival of the last rank to the end."""
    exposed_s: float
    """Median seconds of it beside no computation, of the rank that waits least."""
    size_bytes: int
    """Bytes of the message; 0: not known."""
    bus_bytes_per_s: float | None
    """Bus bandwidth from the last arrival on (costs.communication); None where the size is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathPart:
    """A stretch of the critical path of the last step: what the step's end waited for."""

    rank: int
    """Rank that it runs through."""
    what: str
    """work, up to the arrival at a collective; or the collective."""
    time_s: float
    """Seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRanks:
    """All ranks of which traces were read."""

    num_steps: int
    """Number of steps that every trace has."""
    ranks: tuple[TracedRank, ...]
    """The ranks in order."""
    meetings: tuple[Meeting, ...]
    """The collectives of a step, the one waited for longest first."""
    path: tuple[PathPart, ...]
    """The critical path through the last step."""
    clock_error_s: float | None
    """Median seconds by which ends of a collective differ on aligned clocks; None: no collective was found in two."""

    @property
    def imbalance(self) -> float:
        """Longest compute time over the mean, minus 1."""
        mean_s = sum(rank.compute_s for rank in self.ranks) / len(self.ranks)
        return max(rank.compute_s for rank in self.ranks) / mean_s - 1 if mean_s else 0.0
