"""Profile of a few steps: device time by phase, kernel and operator; and the ranks of one run side by side.

A profiler slows Python, so these times give shares, kernels and gaps, never step times. A profile's totals cover all
profiled steps; ranks' times are per step, on clocks aligned by the common ends of collectives.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from steplab.records.record import Problem, as_long, known
from steplab.units import counted, format_time

PHASES = ("forward", "backward", "gradient sync", "optimizer")
"""Phases in order; gradient sync waits for gradients averaged over data-parallel ranks."""
OUTSIDE = "outside"
ATTENTION_PARTS = ("scores", "softmax", "values")
"""Endings of the ranges of plain attention's parts."""

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
"""Kernel categories. other: known kernels of no category (random numbers, sorting, indices). uncategorised: no rule
matches.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelStats:
    """One kernel in one phase and range, on one stream. On a CPU, an operator without the time of its callees."""

    name: str
    category: str
    phase: str
    """Phase of the launching host call: one of PHASES, or outside."""
    range: str
    """Part of the model without layer numbers, such as 'blocks.*.attention.scores'; backward kernels have their forward
    operator's range. '': unknown.
    """
    stream: int
    """Device stream; on a CPU, the thread."""
    calls: int
    total_s: float
    median_s: float
    max_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OpStats:
    """One operator with one input shape, in one phase and range."""

    name: str
    category: str
    phase: str
    range: str
    inputs: str
    """Types and shapes of inputs, such as 'bf16[2048, 768] bf16[768, 3072]'; '': the trace lacks them."""
    dtype: str
    """Number format of the computation: fp32, bf16, fp16; '': unknown."""
    calls: int
    kernels: int
    """Kernels launched by the operator itself, in all calls."""
    device_s: float
    flops: float | None = None
    """FLOPs of all calls, two per multiply-add; None: steplab cannot count this operator."""
    moved_bytes: float | None = None
    """Least bytes moved by all calls, each tensor read or written once; None: steplab cannot count this operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """One phase on the device's timeline, over all profiled steps.

    It lasts from the previous phase's end to its own last kernel's end, as CUDA events would measure, so phases tile
    the window.
    """

    phase: str
    window_s: float
    """Device seconds: the sum of busy_s, host_bound_s and idle_s."""
    busy_s: float
    host_bound_s: float
    """Idle seconds before the host launched the next kernel."""
    idle_s: float
    """Idle seconds between the next kernel's launch and its start."""
    categories: dict[str, float]
    """Seconds by category, split equally between overlapping kernels; they sum to busy_s."""
    host_s: float | None = None
    """Host seconds; None: the trace marks no phases."""
    num_kernels: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Overlap of collectives and computation, by exact unions of intervals."""

    total_s: float
    overlapped_s: float
    """Seconds of `total_s` with a kernel that is no collective; copies and fills do not count."""

    @property
    def exposed_s(self) -> float:
        return self.total_s - self.overlapped_s


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCallStats:
    """Equal host calls that wait for the device, copy to or from it, or allocate on it."""

    name: str
    """Such as cudaStreamSynchronize, cudaMalloc, or cudaMemcpyAsync with its direction."""
    phase: str
    range: str
    calls: int
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Kernels of one step as parallel lists, for the timeline chart and export."""

    names: tuple[str, ...]
    categories: tuple[str, ...]
    kernel: tuple[int, ...]
    """Index into `names` per kernel, by start."""
    stream: tuple[int, ...]
    start_ns: tuple[int, ...]
    """Start of each kernel, in ns from the step's window."""
    duration_ns: tuple[int, ...]
    phases: tuple[tuple[str, int, int], ...]
    """Name, start and end of each phase on the device, in ns."""
    ranges: tuple[tuple[str, int, int, int], ...] = ()
    """Name, start, end and depth of each range; start and end, in ns, are its kernels'."""

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
    """Shares of an eager step that `torch.compile` leaves, from a dry run of its operators."""

    memory_bound: float
    """Share of time in memory-bound kernels of the model, without the gaps."""
    products: float
    """Share of time in matrix products; above 1 if a busier GPU lowers its clock."""
    kernels: float
    host: float
    reads_at: tuple[str, ...] = ()
    """Code that reads tensor values on the host, as `.item()` does, such as model.py:12."""
    made_at: tuple[str, ...] = ()
    """Code that makes tensors without a device, so the host makes and copies them."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Profile:
    source: str
    """torch.profiler (steplab's own run), or kineto or nsys (an imported file)."""
    device: str
    num_steps: int
    """Steps in the window; 1 if the trace marks none."""
    window_s: float
    """Seconds from the first step's first kernel to the last step's last."""
    phases: tuple[PhaseTime, ...]
    """Phases in order; `outside` is last, if present."""
    kernels: tuple[KernelStats, ...]
    ops: tuple[OpStats, ...]
    """Operators that launched kernels, largest device time first."""
    host_calls: tuple[HostCallStats, ...] = ()
    """Host calls that wait, copy or allocate, longest total first."""
    host_work_s: dict[str, float] = field(default_factory=dict)
    """Host seconds in ranges without kernels: `data loading`, `compilation`. Empty: absent in the trace."""
    communication: Communication | None = None
    timeline: Timeline | None = None
    num_launches: int = 0
    compiled: CompiledShares | None = None
    """Predicted effect of compiling; None: not an eager CUDA step, or no dry run possible (see notes)."""
    file: str | None = None
    device_name: str | None = None
    notes: tuple[str, ...] = ()
    """Gaps of the trace and of attribution, with their effect."""
    doubts: tuple[str, ...] = ()
    """Notes that put the whole profile in doubt: a damaged or cut file, or another device's work."""

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

    def problems(self) -> Iterator[Problem]:
        phases = (*PHASES, OUTSIDE)
        if self.num_steps < 1:
            yield ".num_steps", "must be at least 1, not 0"
        if not self.phases:
            yield ".phases", "is empty"
        for name in ("phases", "kernels", "ops", "host_calls"):
            for index, part in enumerate(getattr(self, name)):
                yield from known(f".{name}[{index}].phase", part.phase, phases)
                if name in ("kernels", "ops"):
                    yield from known(f".{name}[{index}].category", part.category, CATEGORIES)
                if getattr(part, "calls", 1) < 1:
                    yield f".{name}[{index}].calls", "must be at least 1, not 0"
        for index, phase in enumerate(self.phases):
            for category in phase.categories:
                yield from known(f".phases[{index}].categories", category, CATEGORIES)
        if timeline := self.timeline:
            for index, category in enumerate(timeline.categories):
                yield from known(f".timeline.categories[{index}]", category, CATEGORIES)
            for index, (phase_name, *_) in enumerate(timeline.phases):
                yield from known(f".timeline.phases[{index}]", phase_name, phases)


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
    bus_bytes_per_s: float | None
    """Bus bandwidth from the last arrival on (costs.communication); None: unknown size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathPart:
    """A stretch of the last step's critical path."""

    rank: int
    what: str
    """work, up to the arrival at a collective; or the collective."""
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRanks:
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
