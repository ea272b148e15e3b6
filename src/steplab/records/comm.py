"""What a benchmark of collectives came to: cells with every rank's raw samples, and the machine's profile."""

from dataclasses import dataclass, field
from statistics import median

from steplab.records.failure import Outcome
from steplab.records.record import Benchmark
from steplab.specs.comm import CommSpec, CommStudy
from steplab.stats import drift, medians_of_thirds

COMM_SCHEMA = "steplab.comm/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommRank:
    """One of the processes."""

    rank: int
    """Its number, from 0."""
    host: str
    """Name of its machine."""
    device: str
    """What its device is called, with its number: 'cuda:1 NVIDIA H200'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """One rank's samples of one cell, a sample a repeat, in the order they were taken."""

    rank: int
    """Its number."""
    device_s: tuple[float, ...] | None = None
    """Seconds a call, calls back to back in rows with an event after each sample; None without such a device."""
    calls_per_sample: int = 1
    """Of how many calls in a row each of those is the mean."""
    num_waits: int | None = None
    """How many of those samples had calls that were not all started when the device had ended the sample before: it may
    have waited for the host in them. None where that is not known."""
    held_s: float | None = None
    """For how long the device was held before a row at the most, so that Python was ahead of it; None where that is not
    known, or the host is the device."""
    alone_s: tuple[float, ...] = ()
    """Seconds on the host's clock of single calls, each after a barrier, the device synchronised at both ends."""

    @property
    def best_s(self) -> tuple[float, ...]:
        """Back to back where the device has a timeline of its own, else the calls one by one."""
        return self.device_s or self.alone_s

    @property
    def median_s(self) -> float:
        """Of the better samples."""
        return median(self.best_s)

    @property
    def thirds_s(self) -> tuple[float, float, float]:
        """Of the first, the middle and the last third of those."""
        return medians_of_thirds(self.best_s)

    @property
    def drift(self) -> float:
        """The median over the least of these: by how much a disturbance that passed, or set in, has moved it."""
        return drift(self.best_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommCheck:
    """The result of one call set beside the closed form, over all ranks."""

    num_elements: int
    """How many were compared."""
    num_wrong: int
    """How many differ; the data are small whole numbers, of which every sum is exact."""
    first_wrong: str = ""
    """In words, the first that differs: 'rank 1, element 17 is 3 and should be 5'; empty where none does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommCell(Outcome):
    """One collective of one size."""

    spec: CommSpec
    """What was asked."""
    message_bytes: int
    """The message as it was moved, S."""
    wire_bytes: float | None = None
    """What each rank sends at least: S times the factor of the bus bandwidth; None while that is being measured."""
    ranks: tuple[RankTimes, ...] = ()
    """Every participating rank's samples; empty for a failure."""
    check: CommCheck | None = None
    """Of the result; None where nothing came of it."""

    @property
    def slowest(self) -> RankTimes | None:
        """The rank with the longest median, whose times are the cell's; None without any."""
        return max(self.ranks, key=lambda times: times.median_s, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommFit:
    """A line through the times of one collective: time = alpha + beta · bytes on the wire (+ gamma · ranks)."""

    collective: str
    """Of this collective,"""
    way: str
    """by this backend (specs.comm.CommSpec.way),"""
    dtype: str
    """of elements of this type."""
    world_size: int | None
    """On so many ranks; None: over all world sizes, with gamma."""
    alpha_s: float
    """Seconds of a call that moves nothing."""
    beta_s_per_byte: float
    """Seconds a byte on the wire; its inverse is the bus bandwidth that long messages approach."""
    gamma_s_per_rank: float | None = None
    """Seconds a rank; None where world sizes were not fitted together."""
    num_points: int
    """Cells that it was fitted to."""
    rms_relative: float | None
    """Root mean square of (fitted - measured) / measured, which the fit made smallest; None: as few points as terms,
    which any line fits (in records of before lines took three sizes)."""
    worst_relative: float | None
    """The largest of them in size, with its sign; None likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommFacts:
    """What holds for all cells, as the ranks tell it."""

    ranks: tuple[CommRank, ...] = ()
    """The processes."""
    libraries: dict[str, str] = field(default_factory=dict)
    """Versions of what moves the bytes: {'nccl': '2.28.9'}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommRun(Benchmark[CommCell]):
    """A stored benchmark of collectives."""

    study: CommStudy
    """What was asked, and how it was to be measured."""
    ranks: tuple[CommRank, ...] = ()
    """The processes."""
    libraries: dict[str, str] = field(default_factory=dict)
    """Versions of what moves the bytes: {'nccl': '2.28.9'}."""
    profile: tuple[CommFit, ...] = ()
    """The machine's communication profile."""
    schema: str = COMM_SCHEMA
    """Format of this record."""
