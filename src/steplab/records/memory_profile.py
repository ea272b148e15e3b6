"""What the memory of one step was made of: the peak by category, the way there, and who asked for it.

Taken from a step that was watched, as a profile is, after all timing. Sizes are what the allocator handed out; what was
asked of it and what it added for alignment are told apart by the category `rounding`.
"""

from dataclasses import dataclass, field

MEMORY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "autocast_copies",
    "inputs",
    "workspaces",
    "temporaries",
    "rounding",
)
"""parameters: and buffers. gradients: of parameters. activations: made in a forward pass (a recomputed one too) and
alive when it ended, because backward wants them. autocast_copies: weights cast once for all uses. workspaces: alive
before and after the step and nobody's tensor (a library's, such as cuBLAS'). temporaries: all else made in the step.
rounding: what the allocator added to what was asked."""

UNNAMED_CATEGORIES = ("before", "during", "rounding")
"""Of an imported snapshot, whose owners nobody named: allocated before its history begins, and since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTimeline:
    """Allocated bytes by category over time, thinned to what a picture shows without losing a peak."""

    time_s: tuple[float, ...]
    """Seconds since the recording began, ascending; the position among the events where they carry no time."""
    categories: tuple[str, ...]
    """Categories, in the order they are stacked."""
    allocated_bytes: tuple[tuple[int, ...], ...]
    """For each category, bytes from that time to the next."""
    by_event: bool = False
    """Whether `time_s` counts events, for want of clock times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPhase:
    """A phase of the step on the timeline."""

    name: str
    """forward, backward, optimizer; or step."""
    start_s: float
    """On the timeline's axis."""
    end_s: float
    """On the timeline's axis."""
    peak_bytes: int
    """Most bytes allocated within it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """One piece of memory that a tensor or a library asked for."""

    requested_bytes: int
    """What was asked for."""
    block_bytes: int
    """What the allocator set aside; of several alike, on average."""
    category: str
    """One of the categories."""
    phase: str | None = None
    """Phase it was made in; None: before the recording."""
    module: str | None = None
    """Module it was made in, by dotted name (blocks.3.attention); None: none, or not known."""
    op: str | None = None
    """Operator that made it (aten::mm); None: not known."""
    source: str | None = None
    """The line that made it, `model.py:81 in forward`; None: no Python frame (made by the autograd engine)."""
    shape: tuple[int, ...] | None = None
    """Of the tensor it was made for."""
    dtype: str | None = None
    """Of that tensor: float32, bfloat16."""
    at_peak: bool = False
    """Whether it was alive at the peak."""
    count: int = 1
    """How many there are alike (same size, category, phase, source, module apart from layer numbers)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensors:
    """Tensors alike that autograd kept for the backward pass."""

    module: str
    """Module in whose forward pass they were saved, layer numbers replaced: blocks.*.attention; '' outside of any."""
    op: str
    """Operator that saved them, by its backward node: MmBackward0."""
    shape: tuple[int, ...]
    """Of one."""
    dtype: str
    """float32, bfloat16, ..."""
    count: int
    """How many."""
    stored_bytes: int
    """Memory they hold that no earlier one holds: a tensor saved twice counts once, a parameter not at all."""
    category: str = "activations"
    """activations, parameters, autocast_copies or inputs: whose memory it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMemory:
    """What one Transformer block keeps and emits."""

    module: str
    """blocks.0"""
    saved_bytes: int
    """Activations it keeps for its backward pass."""
    gradient_bytes: int | None = None
    """Gradients of its parameters that its backward pass leaves behind; None without a backward pass."""
    input_bytes: int | None = None
    """Its input: one residual-stream tensor."""
    input_shape: tuple[int, ...] | None = None
    """Of that tensor."""
    input_dtype: str | None = None
    """Of that tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """What a list of this record was too long to hold."""

    count: int
    """How many."""
    num_bytes: int
    """What they hold together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProfile:
    """The memory of one watched step."""

    source: str
    """cuda allocator: its own history; cpu allocator: each allocation as it reports it to torch's profiler, for want of
    a history; snapshot: someone's pickle."""
    peak_bytes: int
    """Most bytes allocated at once. The values of `at_peak` sum to it."""
    at_peak: dict[str, int]
    """Bytes by category at that moment, rounding among them."""
    peak_s: float
    """When, on the timeline's axis."""
    peak_phase: str | None = None
    """Phase of the peak; None: not known."""
    peak_module: str | None = None
    """Module under way then, in its forward pass or in its recomputation."""
    peak_op: str | None = None
    """Operator whose allocation reached the peak."""
    peak_source: str | None = None
    """Line of that allocation."""
    counted_peak_bytes: int | None = None
    """The allocator's own high-water mark over the same step; None where it keeps none."""
    unwatched_peak_bytes: int | None = None
    """Its high-water mark over the steps that were timed, which nobody watched."""
    reserved_bytes: int | None = None
    """Most bytes the allocator held from the device; what exceeds the peak was cached or fragmented."""
    outside_bytes: int | None = None
    """Memory of the device in use beyond what the allocator holds: context, libraries, NCCL, other processes."""
    timeline: MemoryTimeline
    """The way to the peak and back."""
    phases: tuple[MemoryPhase, ...] = ()
    """In their order; empty for a snapshot."""
    largest: tuple[Allocation, ...] = ()
    """The largest groups of allocations alive at the peak, then others large, largest first."""
    saved: tuple[SavedTensors, ...] = ()
    """What autograd kept, most bytes first; empty where it kept nothing or could not be asked."""
    saved_left_out: LeftOut | None = None
    """The kinds of saved tensors beyond those; None: none."""
    blocks: tuple[BlockMemory, ...] = ()
    """The first Transformer block, and any that differs from it."""
    blocks_left_out: LeftOut | None = None
    """The kinds of block beyond those, and what one of each keeps; None: none."""
    num_events: int = 0
    """Allocations and releases recorded."""
    device: str | None = None
    """Which device's history, 'cuda:0'; None where there is one alone."""
    device_name: str | None = None
    """What the device is called; None: not said."""
    file: str | None = None
    """Name of the imported file."""
    notes: tuple[str, ...] = field(default=())
    """What is missing, and why, in words."""

    @property
    def phase_peaks(self) -> dict[str, int]:
        """Peak bytes of each phase, by name, in their order; of one that runs several times in a step the highest."""
        found: dict[str, int] = {}
        for phase in self.phases:
            found[phase.name] = max(found.get(phase.name, 0), phase.peak_bytes)
        return found
