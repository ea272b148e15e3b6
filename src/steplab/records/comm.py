"""The record of a benchmark of collectives: cells with every rank's raw samples, and the communication profile."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import median

from steplab.records.failure import Outcome
from steplab.records.figure import Figure, measured_cell
from steplab.records.measured import MeasuredCell
from steplab.records.problems import Problem, known, numbered
from steplab.records.record import Benchmark
from steplab.records.rows import Row, Scalar, head, tail
from steplab.specs.comm import COLLECTIVES, CommSpec, CommStudy
from steplab.stats import drift, medians_of_thirds, percentile


@dataclass(frozen=True, kw_only=True, slots=True)
class CommRank:
    """One rank: its process, machine and device."""

    rank: int
    """Number of the rank, from 0."""
    host: str
    """Name of the machine that it ran on."""
    device: str
    """Number and name of its device, such as 'cuda:1 NVIDIA H200'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """One rank's samples of one cell, one per repeat, in the order they were taken."""

    rank: int
    """Number of the rank, from 0."""
    device_s: tuple[float, ...] | None = None
    """Seconds per call for calls back to back, between events on the device; None for a device without events."""
    calls_per_sample: int = 1
    """Number of consecutive calls whose mean time is one sample of `device_s`."""
    num_waits: int | None = None
    """Number of samples of `device_s` in which the device may have waited for the host, because not all of their calls
    were started when the device ended the sample before. None: not known."""
    held_s: float | None = None
    """Longest time in seconds that the device was held before a row of calls, to give Python a head start; None if that
    is not known, or the device is the host."""
    alone_s: tuple[float, ...] = ()
    """Seconds of single calls on the host's clock, each after a barrier, with the device synchronised before and
    after."""

    @property
    def best_s(self) -> tuple[float, ...]:
        """The samples that steplab reports: `device_s` if the device has events, else `alone_s`."""
        return self.device_s or self.alone_s

    @property
    def median_s(self) -> float:
        """Median of `best_s`."""
        return median(self.best_s)

    @property
    def thirds_s(self) -> tuple[float, float, float]:
        """Medians of the first, the middle and the last third of `best_s`."""
        return medians_of_thirds(self.best_s)

    @property
    def drift(self) -> float:
        """The median divided by the smallest of `thirds_s`, which shows a disturbance that began or ended."""
        return drift(self.best_s)

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        if not self.best_s or not all(self.best_s):
            yield ".device_s" if self.device_s else ".alone_s", "has no samples, or one that took no time"
        if self.calls_per_sample < 1:
            yield ".calls_per_sample", "must be at least 1, not 0"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommCheck:
    """Comparison of one call's result with the closed form, over all ranks."""

    num_elements: int
    """Number of elements that were compared."""
    num_wrong: int
    """Number of wrong elements; the data are small whole numbers, whose sums are exact in every type."""
    first_wrong: str = ""
    """The first wrong element, such as 'rank 1, element 17 is 3 and should be 5'; empty if all are right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommCell(Outcome):
    """The measurement of one collective at one message size."""

    spec: CommSpec
    """The cell as requested."""
    message_bytes: int
    """Size of the message that was sent, S of nccl-tests, in bytes."""
    wire_bytes: float | None = None
    """Least number of bytes that each rank sends: S times the factor of the bus bandwidth; None during the
    measurement."""
    ranks: tuple[RankTimes, ...] = ()
    """Samples of every participating rank; empty for a failure."""
    check: CommCheck | None = None
    """Check of the result; None if no result was checked."""

    @property
    def slowest(self) -> RankTimes | None:
        """The rank with the longest median, whose times are the cell's; None for a failure."""
        return max(self.ranks, key=lambda times: times.median_s, default=None)

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes of the message per second; None for a failure."""
        return self.message_bytes / self.slowest.median_s if self.slowest else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second that each rank has to send at least (nccl-tests); None for a failure."""
        return self.wire_bytes / self.slowest.median_s if self.slowest and self.wire_bytes is not None else None

    @property
    def rank_spread(self) -> float | None:
        """Relative difference of the slowest rank's median from the fastest's; None for a failure."""
        medians = [times.median_s for times in self.ranks]
        return max(medians) / min(medians) - 1 if medians else None

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        yield from numbered(".ranks", [times.rank for times in self.ranks], self.spec.world_size)
        if not self.failure and not self.ranks:
            yield ".ranks", "is empty, and no failure says why"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommFit:
    """A line through the times of one collective: time = alpha + beta · bytes on the wire (+ gamma · ranks)."""

    collective: str
    """The collective that the line is for."""
    way: str
    """Transport that the line is for (specs.comm.CommSpec.transport)."""
    dtype: str
    """Number format of the elements that the line is for."""
    world_size: int | None
    """Number of ranks that the line is for; None: all world sizes, with the gamma term."""
    alpha_s: float
    """Fixed time of a call in seconds."""
    beta_s_per_byte: float
    """Seconds per byte on the wire; its inverse is the bus bandwidth of long messages."""
    gamma_s_per_rank: float | None = None
    """Seconds per rank; None if world sizes were not fitted together."""
    num_points: int
    """Number of cells that the line was fitted to."""
    rms_relative: float | None
    """Root mean square of (fitted - measured) / measured, which the fit minimises; None: no more points than terms,
    which every line fits exactly (only in old records, which needed fewer than three sizes)."""
    worst_relative: float | None
    """The value of (fitted - measured) / measured that is largest in magnitude, with its sign; None as above."""

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        yield from known(".collective", self.collective, COLLECTIVES)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommFacts:
    """Facts that are the same for all cells, reported by the ranks."""

    ranks: tuple[CommRank, ...] = ()
    """The processes."""
    libraries: dict[str, str] = field(default_factory=dict)
    """Versions of what moves the bytes: {'nccl': '2.28.9'}."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
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
    schema: str = "steplab.comm/1"
    """Format of this record."""

    @property
    def num_requested(self) -> int:
        """Number of cells in the study."""
        return len(self.study.cells)

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        yield from numbered(".ranks", [rank.rank for rank in self.ranks], self.study.num_processes)


def comm_row(run: CommRun) -> Row:
    """The row of a benchmark of collectives."""
    collectives = dict.fromkeys(cell.collective for cell in run.study.cells)
    return (
        head(run, "comm")
        | {
            "description": run.study.name,
            "num_ranks": run.study.num_processes,
            "backend": ", ".join(dict.fromkeys(cell.transport for cell in run.study.cells)),
            "collectives": "all" if set(collectives) == set(COLLECTIVES) else ", ".join(collectives),
        }
        | tail(run)
    )


def _slowest(read: Callable[[RankTimes], Scalar]) -> Callable[[CommCell], Scalar]:
    return lambda cell: read(cell.slowest) if cell.slowest else None


COMM_FIGURES: tuple[Figure[CommCell], ...] = (
    Figure(key="samples", find=_slowest(lambda times: len(times.best_s))),
    Figure(key="calls_per_sample", find=_slowest(lambda times: times.calls_per_sample)),
    Figure(key="busbw_bytes_per_s", header="busbw GB/s", unit="GB/s", find=lambda cell: cell.bus_bandwidth),
    Figure(
        key="algbw_bytes_per_s", header="algbw GB/s", unit="GB/s", find=lambda cell: cell.algorithm_bandwidth, rank=2
    ),
    Figure(
        key="time_s",
        header="median",
        find=_slowest(lambda times: times.median_s),
        group="time",
        name="time",
        samples=lambda cell: cell.slowest.best_s if cell.slowest else (),
        decides=True,
    ),
    Figure(key="min_s", header="min", find=_slowest(lambda times: min(times.best_s)), rank=1),
    Figure(key="p95_s", header="p95", find=_slowest(lambda times: percentile(times.best_s, 95)), rank=1),
    Figure(
        key="alone_s",
        header="alone",
        find=lambda cell: max((median(times.alone_s) for times in cell.ranks if times.alone_s), default=None),
        rank=3,
    ),
    Figure(key="fastest_rank_s", find=lambda cell: min((times.median_s for times in cell.ranks), default=None)),
    Figure(key="rank_spread", header="spread", unit="percent", find=lambda cell: cell.rank_spread, rank=2),
    Figure(key="checked_elements", find=lambda cell: getattr(cell.check, "num_elements", None)),
    Figure(key="wrong_elements", find=lambda cell: getattr(cell.check, "num_wrong", None)),
)
"""The figures of a cell; times are of its slowest rank."""


def comm_cells(run: CommRun) -> tuple[MeasuredCell, ...]:
    """The cells as they are compared: the time of the slowest rank."""
    return tuple(measured_cell(cell, asdict(cell.spec), cell.spec.label, COMM_FIGURES) for cell in run.cells)
