"""Profile of a few steps, by phase, kernel and operator; and a comparison of the ranks of one run.

A profiler slows Python: use these times for shares, kernels and gaps, never as step times. A Profile sums its steps.
Times of ranks are per step. Their clocks are aligned by the ends of collectives, taken to be the same on all ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from steplab.records.record import Positive, Problem, as_long, one_of
from steplab.units import counted, format_time

PHASES = ("forward", "backward", "gradient sync", "optimizer")
"""Phases in order; gradient sync waits for the data-parallel average of gradients."""
OUTSIDE = "outside"
ATTENTION_PARTS = ("scores", "softmax", "values")
"""Last part of the range names in plain attention."""

CATEGORIES = (
    "matmul",
    "attention",
    "softmax",
    "normalisation",
    "elementwise",
    "reduction",
    "embedding",
    "optimizer",
    "copy",
    "communication",
    "other",
    "uncategorised",
)
"""Categories of kernels. other: known kernels outside the categories (random numbers, sorting, indices). uncategorised:
no rule matches the name.
"""
Category = Annotated[str, one_of(CATEGORIES)]
PhaseName = Annotated[str, one_of((*PHASES, OUTSIDE))]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelStats:
    """Calls of one kernel in one phase, range and stream. On a CPU: of one operator, without inner operators' time."""

    name: str
    category: Category
    phase: PhaseName
    """Phase of the host call that launched it: one of PHASES, or outside."""
    range: str
    """Annotated part of the model without layer numbers, such as 'blocks.*.attention.scores'; '': unknown. Backward
    kernels have their forward operator's.
    """
    stream: int
    """CUDA stream, or thread on a CPU."""
    calls: Positive
    total_s: float
    median_s: float
    max_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OpStats:
    """Calls of one operator with one input shape, in one phase and range."""

    name: str
    category: Category
    phase: PhaseName
    range: str
    inputs: str
    """Types and shapes of inputs, such as 'bf16[2048, 768] bf16[768, 3072]'; '': not in the trace."""
    dtype: str
    """Data type of the computation: fp32, bf16, fp16; '': unknown."""
    calls: Positive
    kernels: int
    """Kernels that the operator launched itself, summed over calls."""
    device_s: float
    flops: float | None = None
    """FLOPs summed over calls, two per multiply-add; None: steplab has no formula for this operator."""
    moved_bytes: float | None = None
    """Least bytes moved, summed over calls; each tensor is read or written once. None: no formula for this operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """Device time of one phase, summed over profiled steps.

    A phase lasts from the previous one's end to its own last kernel's end, as by CUDA events, so phases leave no gaps.
    """

    phase: PhaseName
    window_s: float
    """Seconds of the phase on the device: busy_s + host_bound_s + idle_s."""
    busy_s: float
    host_bound_s: float
    """Idle seconds while the host had not yet launched the next kernel; on a CPU, seconds outside operators."""
    idle_s: float
    """Idle seconds while the next kernel had been launched but not started; 0 on a CPU."""
    categories: dict[Category, float]
    """Busy seconds by category; overlapping kernels share their common time equally."""
    host_s: float | None = None
    """Seconds of the phase on the host; None: the trace marks no phases."""
    num_kernels: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Times of collectives, and their overlap with computation, from exact unions of intervals."""

    total_s: float
    overlapped_s: float
    """Seconds of `total_s` during which a kernel computes; copies and fills do not count."""

    @property
    def exposed_s(self) -> float:
        return self.total_s - self.overlapped_s


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCallStats:
    """Host calls of one name that wait for the device, copy to or from it, or allocate on it."""

    name: str
    """Call, such as cudaStreamSynchronize, cudaMalloc, or cudaMemcpyAsync with its direction."""
    phase: PhaseName
    range: str
    calls: Positive
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Kernels of one step as parallel columns, for the timeline chart and export."""

    names: tuple[str, ...]
    categories: tuple[Category, ...]
    kernel: tuple[int, ...]
    """Index into `names` of each kernel, in order of start."""
    stream: tuple[int, ...]
    start_ns: tuple[int, ...]
    """Start of each kernel in ns after the step's start."""
    duration_ns: tuple[int, ...]
    phases: tuple[tuple[PhaseName, int, int], ...]
    """Name, start and end of each phase on the device, in ns."""
    ranges: tuple[tuple[str, int, int, int], ...] = ()
    """Name, start, end and depth of each range; it spans its kernels, in ns."""

    def problems(self) -> Iterator[Problem]:
        yield from as_long(".categories", self.categories, len(self.names), ".names")
        for name in ("stream", "start_ns", "duration_ns"):
            yield from as_long(f".{name}", getattr(self, name), len(self.kernel), ".kernel")
        for index, kernel in enumerate(self.kernel):
            if kernel >= len(self.names):
                yield f".kernel[{index}]", f"is number {kernel} of {len(self.names)} names"
        for name in ("phases", "ranges"):
            for index, (_, start, end, *_) in enumerate(getattr(self, name)):
                if end < start:
                    yield f".{name}[{index}]", f"ends at {end} ns, before it starts at {start} ns"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledShares:
    """Predicted costs of a step under torch.compile, each as a ratio to the eager step's."""

    memory_bound: float
    """Ratio of time in the model's memory-bound kernels, without gaps between kernels."""
    products: float
    """Ratio of time in matrix products; above 1 if the GPU, busier when compiled, lowers its clock."""
    kernels: float
    host: float
    reads_at: tuple[str, ...] = ()
    """Code lines that read tensor values on the host, as `.item()` does, such as model.py:12."""
    made_at: tuple[str, ...] = ()
    """Code lines that make tensors on the CPU, for lack of a device argument, and copy them."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Profile:
    source: str
    """torch.profiler for steplab's own runs; kineto or nsys for imported files."""
    device: str
    num_steps: Positive
    """Steps in the profile; 1 if the trace marks none."""
    window_s: float
    """Seconds from the first step's first kernel to the end of the last step's last kernel."""
    phases: Annotated[tuple[PhaseTime, ...], msgspec.Meta(min_length=1)]
    """Phases in order, then `outside` if present."""
    kernels: tuple[KernelStats, ...]
    ops: tuple[OpStats, ...]
    """Operators that launched kernels, by device time."""
    host_calls: tuple[HostCallStats, ...] = ()
    """Host calls that wait, copy or allocate, by total time."""
    host_work_s: dict[str, float] = field(default_factory=dict)
    """Host seconds of work without kernels: `data loading`, `compilation`. Empty: not in the trace."""
    communication: Communication | None = None
    timeline: Timeline | None = None
    num_launches: int = 0
    compiled: CompiledShares | None = None
    """Predicted effect of compiling; None: not an eager step on CUDA, or the step cannot be predicted (see notes)."""
    file: str | None = None
    device_name: str | None = None
    notes: tuple[str, ...] = ()
    """Missing parts of the trace or the attribution, with their effect."""
    doubts: tuple[str, ...] = ()
    """Reasons to doubt the whole profile: a damaged file, or another device's work."""

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} by {self.source}: {counted(self.num_steps, 'step')}, {format_time(self.window_s)}>"
        )

    @property
    def busy_s(self) -> float:
        return sum(phase.busy_s for phase in self.phases)

    def phase(self, name: str) -> PhaseTime | None:
        return next((phase for phase in self.phases if phase.phase == name), None)

    def category_s(self, category: str) -> float:
        return sum(phase.categories.get(category, 0.0) for phase in self.phases)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRank:
    """Times of one rank per step. `compute_s`, `exposed_s` and `idle_s` sum to `step_s`, except for copies (as in
    Holistic Trace Analysis' temporal breakdown).
    """

    rank: int
    step_s: float
    """Seconds from the first step's first device work to the last step's last, over steps."""
    compute_s: float
    """Seconds with at least one kernel other than a collective; copies do not count."""
    hidden_s: float
    """Seconds of collectives that overlap computation."""
    exposed_s: float
    """Seconds of collectives that do not overlap computation."""
    idle_s: float
    num_last: int = 0
    """Collectives, over all steps, that this rank joined last."""
    late_s: float = 0.0
    """Seconds that the median rank waits idle for this rank."""
    timeline: Timeline | None = None
    """The rank's last step: computation on stream 0, communication on stream 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """One collective of a step, matched across ranks and steps."""

    collective: str
    group: str
    """Process group, as ranks or a name; '': unknown."""
    number: int
    """Index among the step's collectives of this kind and group, from 0."""
    num_steps: int
    """Steps with it on at least two ranks."""
    last_rank: int
    late_s: float
    """Median seconds from the middle rank's arrival to that of `last_rank`."""
    transfer_s: float
    """Median seconds from the last rank's arrival to the end."""
    exposed_s: float
    """Median seconds without concurrent computation, on the rank that waits least."""
    size_bytes: int
    bus_bytes_per_s: float | None
    """Bus bandwidth after the last rank's arrival (costs.communication); None: unknown size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathPart:
    """Segment of the last step's critical path."""

    rank: int
    what: str
    """'work' before a collective, or the collective's name."""
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRanks:
    num_steps: int
    ranks: tuple[TracedRank, ...]
    meetings: tuple[Meeting, ...]
    path: tuple[PathPart, ...]
    clock_error_s: float | None
    """Median difference in seconds between ranks' ends of one collective, after aligning clocks; None: no common
    collective.
    """

    @property
    def imbalance(self) -> float:
        """Longest compute time of a rank over the mean, minus 1."""
        mean_s = sum(rank.compute_s for rank in self.ranks) / len(self.ranks)
        return max(rank.compute_s for rank in self.ranks) / mean_s - 1 if mean_s else 0.0
