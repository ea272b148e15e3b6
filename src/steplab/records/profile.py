"""What a profiler saw of a few steps, summed up: where the device's time went.

Every time here was taken under a profiler, which slows the host: it tells shares, kernels and gaps, and is never shown
as step time. Totals are over all profiled steps.
"""

from dataclasses import dataclass

PHASES = ("forward", "backward", "gradient sync", "optimizer")
"""In their order; gradient sync: the wait for gradients that data-parallel ranks average."""
OUTSIDE = "outside"
"""Phase of what belongs to none of those."""

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
"""other: known, and none of the above (random numbers, sorting, indices); uncategorised: no rule knows the kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelStats:
    """One kernel, in one phase and range, on one stream. On a CPU: an operator, its own time without its children's."""

    name: str
    """As the profiler gives it, demangled."""
    category: str
    """One of CATEGORIES."""
    phase: str
    """One of PHASES, or outside: that of the host call that launched it."""
    range: str
    """Where in the model, layer numbers left out ('blocks.*.attention.scores'); a backward kernel has the range of the
    forward operator it belongs to. '' where nothing says it."""
    stream: int
    """Stream of the device (thread, on a CPU)."""
    calls: int
    """How often it ran in all profiled steps."""
    total_s: float
    """Sum of its durations."""
    median_s: float
    """Median duration of a call."""
    max_s: float
    """Longest call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpStats:
    """One operator with inputs of one shape, in one phase and range: what it computed and moved."""

    name: str
    """aten::mm."""
    category: str
    """Of the kernel that took most of its time."""
    phase: str
    """Phase of its calls, as in KernelStats."""
    range: str
    """Range of its calls, as in KernelStats."""
    inputs: str
    """Types and shapes of the tensors it got: 'bf16[2048, 768] bf16[768, 3072]'; '' where the trace does not say."""
    dtype: str
    """Type it computed in, by the names of specs (fp32, bf16, fp16); '' where not known."""
    calls: int
    """How often it was called in all profiled steps."""
    kernels: int
    """Kernels it launched itself, in all calls."""
    device_s: float
    """Sum of their durations."""
    flops: float | None = None
    """Of all calls, 2 a multiply-add; None where no rule counts this operator."""
    moved_bytes: float | None = None
    """Of all calls, each tensor read or written once: the least it can move. None where no rule counts it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """One phase on the device's timeline, all profiled steps together.

    A phase lasts from the end of the phase before it to the end of its own last kernel, as CUDA events between phases
    would measure it, so that the phases tile the window.
    """

    phase: str
    """forward, backward, optimizer or outside."""
    window_s: float
    """Its length, on the device's timeline."""
    busy_s: float
    """Time in which at least one kernel ran."""
    host_bound_s: float
    """Idle time in which the next kernel had not yet been launched: the device waited for the host."""
    idle_s: float
    """Idle time otherwise: the kernel was launched, and had not begun. busy + host_bound + idle = window."""
    categories: dict[str, float]
    """Seconds by category; where kernels overlap, each gets its share of the instant. Sums to busy_s."""
    host_s: float | None = None
    """Length of the phase's range on the host's clock; None where the trace marks no phases."""
    num_kernels: int = 0
    """Kernels that the phase launched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Collectives against computation, as lengths of exact unions of intervals."""

    total_s: float
    """Time in which at least one collective ran."""
    overlapped_s: float
    """Of it, time in which a kernel that is no collective ran as well; memory copies and fills do not count."""

    @property
    def exposed_s(self) -> float:
        """Time in which no computation ran beside it."""
        return self.total_s - self.overlapped_s


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCallStats:
    """A call of the host that makes it wait for the device or copies to or from it."""

    name: str
    """cudaStreamSynchronize, cudaMemcpyAsync (with the direction), cudaMalloc, ..."""
    phase: str
    """Phase in which the host made it."""
    range: str
    """Range in which the host made it."""
    calls: int
    """How often, in all profiled steps."""
    total_s: float
    """Host time in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Every kernel of one step, as parallel lists, for the picture and for export."""

    names: tuple[str, ...]
    """Each kernel's name once."""
    categories: tuple[str, ...]
    """Category of each name."""
    kernel: tuple[int, ...]
    """Number of the name, a kernel each, in the order of start."""
    stream: tuple[int, ...]
    """Stream (thread, on a CPU) of each kernel."""
    start_ns: tuple[int, ...]
    """Start of each kernel, from the beginning of the step's window."""
    duration_ns: tuple[int, ...]
    """How long each ran."""
    phases: tuple[tuple[str, int, int], ...]
    """Name, start and end of each phase on the device's timeline, ns."""
    ranges: tuple[tuple[str, int, int, int], ...] = ()
    """Name, start, end (ns, by the kernels launched within) and depth of the ranges inside the phases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Where the time of some profiled steps went."""

    source: str
    """torch.profiler (steplab's own run), kineto or nsys (an imported file)."""
    device: str
    """cuda or cpu: what the kernels ran on."""
    num_steps: int
    """Steps in the window; 1 where the trace marks none."""
    window_s: float
    """From the start of the first kernel of the first step to the end of the last kernel of the last."""
    phases: tuple[PhaseTime, ...]
    """In the order they ran; `outside` last, where something belongs to no phase."""
    kernels: tuple[KernelStats, ...]
    """Largest total first."""
    ops: tuple[OpStats, ...]
    """Largest device time first; of the operators that launched kernels themselves."""
    host_calls: tuple[HostCallStats, ...] = ()
    """Calls that wait for the device, copy to or from it, or ask it for memory; the longest total first."""
    communication: Communication | None = None
    """None where no collective ran."""
    timeline: Timeline | None = None
    """Of the last step."""
    num_launches: int = 0
    """Host calls that launched the window's kernels."""
    file: str | None = None
    """Name of the imported file."""
    device_name: str | None = None
    """The GPU's name, where the trace says it."""
    notes: tuple[str, ...] = ()
    """What the trace lacked or what could not be attributed, and what that costs."""
    doubts: tuple[str, ...] = ()
    """Those of the notes that put all of the profile in doubt: the file was damaged or cut short, or is perhaps of
    another device's work."""

    @property
    def busy_s(self) -> float:
        """Time in which the device ran at least one kernel."""
        return sum(phase.busy_s for phase in self.phases)

    def phase(self, name: str) -> PhaseTime | None:
        """The phase of that name."""
        return next((phase for phase in self.phases if phase.phase == name), None)

    def category_s(self, category: str, phases: tuple[str, ...] | None = None) -> float:
        """Seconds of a category in the given phases, or in all."""
        chosen = (p for p in self.phases if phases is None or p.phase in phases)
        return sum(phase.categories.get(category, 0.0) for phase in chosen)
