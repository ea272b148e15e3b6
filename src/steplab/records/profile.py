"""The profile of a few steps: the device's time by phase, kernel and operator.

Every time here was taken under a profiler, which slows the host: it serves for shares, kernels and gaps, and is never
shown as step time. Totals are over all profiled steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from steplab.records.problems import Problem, as_long, known
from steplab.units import counted, format_time

PHASES = ("forward", "backward", "gradient sync", "optimizer")
"""The phases of a step in order; gradient sync is the wait for gradients that data-parallel ranks average."""
OUTSIDE = "outside"
"""The phase of work that belongs to none of PHASES."""
ATTENTION_PARTS = ("scores", "softmax", "values")
"""The names in which the ranges of plain attention's parts end."""

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
"""Categories of kernels. other: known kernels outside of the categories above (random numbers, sorting, indices).
uncategorised: kernels that no rule recognises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelStats:
    """One kernel in one phase and range, on one stream. On a CPU, an operator without the time of operators that it
    called."""

    name: str
    """Demangled name by the profiler."""
    category: str
    """Category of the kernel, one of CATEGORIES."""
    phase: str
    """Phase of the host call that launched it: one of PHASES, or outside."""
    range: str
    """Part of the model, without layer numbers, such as 'blocks.*.attention.scores'; a backward kernel has the range of
    the forward operator that it belongs to. '' if it is not known."""
    stream: int
    """Stream of the device; on a CPU, the thread."""
    calls: int
    """Number of calls in all profiled steps."""
    total_s: float
    """Sum of the durations of its calls in seconds."""
    median_s: float
    """Median duration of a call in seconds."""
    max_s: float
    """Longest duration of a call in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpStats:
    """One operator with inputs of one shape, in one phase and range."""

    name: str
    """aten::mm."""
    category: str
    """Category of the kernel that took most of its time."""
    phase: str
    """Phase of its calls, as in KernelStats."""
    range: str
    """Range of its calls, as in KernelStats."""
    inputs: str
    """Types and shapes of its input tensors, such as 'bf16[2048, 768] bf16[768, 3072]'; '' if the trace lacks them."""
    dtype: str
    """Number format of the computation, by the names of specs (fp32, bf16, fp16); '' if it is not known."""
    calls: int
    """Number of calls in all profiled steps."""
    kernels: int
    """Number of kernels that it launched itself, in all calls."""
    device_s: float
    """Sum of the durations of those kernels in seconds."""
    flops: float | None = None
    """FLOPs of all calls, two per multiply-add; None if steplab cannot count them for this operator."""
    moved_bytes: float | None = None
    """Least number of bytes that all calls move: each tensor is read or written once. None if steplab cannot count them
    for this operator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """One phase on the device's timeline, all profiled steps together.

    A phase lasts from the end of the phase before it to the end of its own last kernel, as CUDA events between phases
    would measure it, so that the phases tile the window.
    """

    phase: str
    """The phase: one of PHASES, or outside."""
    window_s: float
    """Length of the phase on the device's timeline in seconds, the sum of busy_s, host_bound_s and idle_s."""
    busy_s: float
    """Seconds in which at least one kernel ran."""
    host_bound_s: float
    """Idle seconds in which the next kernel was not yet launched, so that the device waited for the host."""
    idle_s: float
    """Idle seconds in which the next kernel was launched but had not begun."""
    categories: dict[str, float]
    """Seconds by category; kernels that overlap share the time equally. The values sum to busy_s."""
    host_s: float | None = None
    """Length of the phase on the host's clock in seconds; None if the trace marks no phases."""
    num_kernels: int = 0
    """Number of kernels that the phase launched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Overlap of collectives and computation, as lengths of exact unions of intervals."""

    total_s: float
    """Seconds in which at least one collective ran."""
    overlapped_s: float
    """Seconds of `total_s` in which another kernel than a collective ran as well; memory copies and fills do not
    count."""

    @property
    def exposed_s(self) -> float:
        """Seconds of communication during which no computation ran."""
        return self.total_s - self.overlapped_s


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCallStats:
    """Equal host calls that wait for the device, copy to or from it, or allocate memory on it."""

    name: str
    """Name of the call, such as cudaStreamSynchronize, cudaMalloc or cudaMemcpyAsync with its direction."""
    phase: str
    """Phase in which the host made the call."""
    range: str
    """Range in which the host made the call."""
    calls: int
    """Number of calls in all profiled steps."""
    total_s: float
    """Host time of the calls in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Every kernel of one step as parallel lists, for the timeline chart and for export."""

    names: tuple[str, ...]
    """Name of each different kernel."""
    categories: tuple[str, ...]
    """Category of each name."""
    kernel: tuple[int, ...]
    """Index into `names` of each kernel, in the order of start."""
    stream: tuple[int, ...]
    """Stream of each kernel; on a CPU, its thread."""
    start_ns: tuple[int, ...]
    """Start of each kernel in ns since the beginning of the step's window."""
    duration_ns: tuple[int, ...]
    """Duration of each kernel in ns."""
    phases: tuple[tuple[str, int, int], ...]
    """Name, start and end of each phase on the device's timeline in ns."""
    ranges: tuple[tuple[str, int, int, int], ...] = ()
    """Name, start, end and depth of each range inside the phases; start and end, in ns, are those of its kernels."""

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
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
    """What `torch.compile` of the model leaves of an eager step, as shares of it, from a dry run of its operators."""

    memory_bound: float
    """Share of the time of the model's kernels that memory bandwidth bounds, the gaps between them excluded."""
    products: float
    """Share of the time of matrix products; above 1 where a GPU that pauses less lowers its clock for them."""
    kernels: float
    """Share of the model's kernels."""
    host: float
    """Share of the time that Python takes to launch the step."""
    reads_at: tuple[str, ...] = ()
    """Places in the model's code at which the host reads values off tensors, as `.item()` does, such as model.py:12."""
    made_at: tuple[str, ...] = ()
    """Places at which the model makes tensors without naming a device, so that the host makes and copies them."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Profile:
    """The profile of some steps."""

    source: str
    """Source of the trace: torch.profiler (steplab's own run), or kineto or nsys (an imported file)."""
    device: str
    """Kind of device that the kernels ran on: cuda or cpu."""
    num_steps: int
    """Number of steps in the window; 1 if the trace marks none."""
    window_s: float
    """Seconds from the start of the first kernel of the first step to the end of the last kernel of the last step."""
    phases: tuple[PhaseTime, ...]
    """Times of the phases in order; `outside` is last, if some work belongs to no phase."""
    kernels: tuple[KernelStats, ...]
    """Times of the kernels, the largest total first."""
    ops: tuple[OpStats, ...]
    """Operators that launched kernels themselves, the largest device time first."""
    host_calls: tuple[HostCallStats, ...] = ()
    """Host calls that wait for the device, copy to or from it, or allocate memory on it, the longest total first."""
    host_work_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the host, from the first step to the last, in ranges of work that no kernel needs: `data loading`,
    `compilation`. Empty: the trace has no such ranges."""
    communication: Communication | None = None
    """Overlap of collectives and computation; None if no collective ran."""
    timeline: Timeline | None = None
    """Timeline of the last step; None: not stored."""
    num_launches: int = 0
    """Number of host calls that launched the window's kernels."""
    compiled: CompiledShares | None = None
    """What compiling the model is predicted to leave of a profiled step; None: not predicted, because the step is not
    an eager one on CUDA, or no dry run of it was possible (the notes say why)."""
    file: str | None = None
    """Name of the imported file; None: the profile was made here."""
    device_name: str | None = None
    """Name of the GPU; None if the trace lacks it."""
    notes: tuple[str, ...] = ()
    """What the trace lacks or what could not be attributed, and the effect on the profile."""
    doubts: tuple[str, ...] = ()
    """The notes that make the whole profile doubtful: the file was damaged or cut short, or may contain another
    device's work."""

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} by {self.source}: {counted(self.num_steps, 'step')}, {format_time(self.window_s)}>"
        )

    @property
    def busy_s(self) -> float:
        """Seconds in which the device ran at least one kernel."""
        return sum(phase.busy_s for phase in self.phases)

    def phase(self, name: str) -> PhaseTime | None:
        """The phase of that name; None if the profile has none."""
        return next((phase for phase in self.phases if phase.phase == name), None)

    def category_s(self, category: str, phases: tuple[str, ...] | None = None) -> float:
        """Seconds of a category in the given phases, or in all phases."""
        chosen = (p for p in self.phases if phases is None or p.phase in phases)
        return sum(phase.categories.get(category, 0.0) for phase in chosen)

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
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
