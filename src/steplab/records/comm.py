"""The record of a collectives benchmark."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Annotated

from steplab.records.failure import Outcome
from steplab.records.figure import Figure, MeasuredCell, measured_cell
from steplab.records.record import Benchmark, Positive, Problem, RankPlace, numbered, one_of
from steplab.records.rows import DESCRIPTION, Scalar
from steplab.specs.comm import COLLECTIVES, CommSpec, CommStudy
from steplab.stats import drift, medians_of_thirds, percentile


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Times of one rank in one cell, one sample per repeat."""

    rank: int
    device_s: tuple[float, ...] | None = None
    """Seconds per call between device events, calls back to back; None: the device has no events."""
    calls_per_sample: Positive = 1
    """Consecutive calls averaged into each sample of `device_s`."""
    num_waits: int | None = None
    """Samples of `device_s` that may include a wait: some launches came after the previous sample ended. None:
    unknown.
    """
    held_s: float | None = None
    """Longest time in seconds that the device was kept waiting before timed calls, so that Python could launch ahead.
    None: unknown, or a CPU.
    """
    alone_s: tuple[float, ...] = ()
    """Host seconds of single calls after a barrier, synchronised before and after each call."""

    @property
    def best_s(self) -> tuple[float, ...]:
        """`device_s` if present, else `alone_s`."""
        return self.device_s or self.alone_s

    @property
    def median_s(self) -> float:
        return median(self.best_s)

    @property
    def thirds_s(self) -> tuple[float, float, float]:
        """Medians of the first, middle and last third of `best_s`."""
        return medians_of_thirds(self.best_s)

    @property
    def drift(self) -> float:
        """Median of all samples over the smallest median of a third of them: clearly above 1 if times changed
        meanwhile.
        """
        return drift(self.best_s)

    def problems(self) -> Iterator[Problem]:
        if not self.best_s or not all(self.best_s):
            yield ".device_s" if self.device_s else ".alone_s", "has no samples, or a sample without time"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommCheck:
    """One call's results on all ranks against exact values."""

    num_elements: int
    num_wrong: int
    """Wrong elements; inputs are small integers, which every dtype sums exactly."""
    first_wrong: str = ""
    """First wrong element, such as 'rank 1, element 17 is 3 and should be 5'; empty: all are right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommCell(Outcome):
    spec: CommSpec
    message_bytes: int
    """S of nccl-tests: the message size."""
    wire_bytes: float | None = None
    """Least bytes that each rank must send: S times the bus bandwidth's factor. None while measuring."""
    ranks: tuple[RankTimes, ...] = ()
    check: CommCheck | None = None

    @property
    def slowest(self) -> RankTimes | None:
        """Rank with the largest median, which gives the cell's figures. None after a failure."""
        return max(self.ranks, key=lambda times: times.median_s, default=None)

    @property
    def algorithm_bandwidth(self) -> float | None:
        return self.message_bytes / self.slowest.median_s if self.slowest else None

    @property
    def bus_bandwidth(self) -> float | None:
        """`wire_bytes` over the slowest rank's median seconds, as in nccl-tests; None after a failure."""
        return self.wire_bytes / self.slowest.median_s if self.slowest and self.wire_bytes is not None else None

    @property
    def rank_spread(self) -> float | None:
        """Slowest rank's median over the fastest's, minus 1; None after a failure."""
        medians = [times.median_s for times in self.ranks]
        return max(medians) / min(medians) - 1 if medians else None

    def problems(self) -> Iterator[Problem]:
        yield from numbered(".ranks", [times.rank for times in self.ranks], self.spec.world_size)
        if not self.failure and not self.ranks:
            yield ".ranks", "is empty, and no failure says why"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommFit:
    """Fitted cost of one collective: time = alpha + beta · bytes sent (+ gamma · ranks)."""

    collective: Annotated[str, one_of(COLLECTIVES)]
    way: str
    dtype: str
    world_size: int | None
    """Number of ranks; None: one fit over all world sizes, with gamma."""
    alpha_s: float
    beta_s_per_byte: float
    """Seconds per byte sent: the inverse of the bus bandwidth of long messages."""
    gamma_s_per_rank: float | None = None
    """Seconds per rank; None: the fit is of one world size."""
    num_points: int
    rms_relative: float | None
    """Root mean square of (fitted - measured) / measured, which the fit minimises. None: it would be zero, with no more
    points than coefficients.
    """
    worst_relative: float | None
    """Largest (fitted - measured) / measured by magnitude, signed; None as for `rms_relative`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommFacts:
    ranks: tuple[RankPlace, ...] = ()
    libraries: dict[str, str] = field(default_factory=dict)
    """Version per transport library, such as {'nccl': '2.28.9'}."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CommRun(Benchmark[CommCell]):
    study: CommStudy
    ranks: tuple[RankPlace, ...] = ()
    libraries: dict[str, str] = field(default_factory=dict)
    profile: tuple[CommFit, ...] = ()
    schema: str = "steplab.comm/1"

    @property
    def num_requested(self) -> int:
        return len(self.study.cells)

    def problems(self) -> Iterator[Problem]:
        yield from numbered(".ranks", [rank.rank for rank in self.ranks], self.study.num_processes)


def _num_ranks(run: CommRun) -> int:
    return run.study.num_processes


def _transports(run: CommRun) -> str:
    return ", ".join(dict.fromkeys(cell.transport for cell in run.study.cells))


def _collectives(run: CommRun) -> str:
    found = dict.fromkeys(cell.collective for cell in run.study.cells)
    return "all" if set(found) == set(COLLECTIVES) else ", ".join(found)


COMM_ROW: tuple[Figure[CommRun], ...] = (
    DESCRIPTION,
    Figure(key="num_ranks", header="ranks", unit="label", find=_num_ranks, shared="{} rank{s}", folds=True),
    Figure(key="backend", header="backend", find=_transports, shared="{}", rank=1, folds=True),
    Figure(
        key="collectives",
        header="collectives",
        find=_collectives,
        shared="collectives: {}",
        rank=1,
        wraps_from=16,
        folds=True,
    ),
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
        note="Alone: one call after a barrier, by the host's clock.",
    ),
    Figure(key="fastest_rank_s", find=lambda cell: min((times.median_s for times in cell.ranks), default=None)),
    Figure(
        key="rank_spread",
        header="spread",
        unit="percent",
        find=lambda cell: cell.rank_spread,
        rank=2,
        note="Spread: how much longer the slowest rank's median is than the fastest's.",
    ),
    Figure(key="checked_elements", find=lambda cell: getattr(cell.check, "num_elements", None)),
    Figure(key="wrong_elements", find=lambda cell: getattr(cell.check, "num_wrong", None)),
)


def comm_cells(run: CommRun) -> tuple[MeasuredCell, ...]:
    return tuple(measured_cell(cell, asdict(cell.spec), cell.spec.label, COMM_FIGURES) for cell in run.cells)
