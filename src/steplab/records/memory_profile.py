"""The memory of one step: the peak by category, memory over time, and the code that allocated it.

It is taken from a step that was watched after all timing. Sizes are those of the allocator's blocks; the category
`rounding` holds what the allocator added to the requested sizes for alignment.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

from steplab.records.problems import Problem, as_long, known
from steplab.units import format_bytes

MEMORY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "autocast_copies",
    "inputs",
    "workspaces",
    "communication",
    "temporaries",
    "rounding",
)
"""Categories of memory by owner. parameters: parameters and buffers. gradients: gradients of parameters. activations:
tensors made in a forward pass (also a recomputed one) and still alive at its end, for the backward pass.
autocast_copies: weights that autocast cast once for all uses. workspaces: memory of a library, such as cuBLAS, that is
allocated before and after the step and belongs to no tensor. communication: weights gathered from other ranks, and
buffers of messages (in predictions only). temporaries: everything else allocated in the step.
rounding: what the allocator added to the requested sizes."""

MEASURED_CATEGORIES = tuple(name for name in MEMORY_CATEGORIES if name != "communication")
"""Categories of a measured step, in which messages are not told from other memory."""

UNNAMED_CATEGORIES = ("before", "during", "rounding")
"""Categories of an imported snapshot without marks. before: allocated before its history begins. during: allocated
since. rounding: as above."""

_DTYPE_BYTES = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
"""Bytes per element, by torch's name of the dtype."""


def tensor_bytes(shape: Iterable[int], dtype: str | None) -> int | None:
    """Bytes of a dense tensor; None where the type is not known."""
    size = _DTYPE_BYTES.get(dtype or "")
    return None if size is None else prod(shape) * size


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTimeline:
    """Allocated bytes by category over time, with fewer points than events but with every peak that a chart shows."""

    time_s: tuple[float, ...]
    """Seconds since the recording began, ascending; the index of the event if events carry no time."""
    categories: tuple[str, ...]
    """Categories, in the order they are stacked."""
    allocated_bytes: tuple[tuple[int, ...], ...]
    """For each category, the bytes allocated from each time to the next."""
    by_event: bool = False
    """Whether `time_s` counts events, because they carry no time."""

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        if not self.time_s:
            yield ".time_s", "is empty"
        if any(later < earlier for earlier, later in zip(self.time_s, self.time_s[1:], strict=False)):
            yield ".time_s", "does not ascend"
        for index, category in enumerate(self.categories):
            yield from known(f".categories[{index}]", category, {*MEMORY_CATEGORIES, *UNNAMED_CATEGORIES})
        yield from as_long(".allocated_bytes", self.allocated_bytes, len(self.categories), ".categories")
        for index, column in enumerate(self.allocated_bytes):
            yield from as_long(f".allocated_bytes[{index}]", column, len(self.time_s), ".time_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPhase:
    """A phase of the step on the timeline."""

    name: str
    """Name of the phase: forward, backward, optimizer, or step."""
    start_s: float
    """Start of the phase, on the timeline's axis."""
    end_s: float
    """End of the phase, on the timeline's axis."""
    peak_bytes: int
    """Most bytes allocated at once during the phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A group of equal allocations by a tensor or a library."""

    requested_bytes: int
    """Requested size of one allocation in bytes."""
    block_bytes: int
    """Size of the allocator's block in bytes, the mean of a group."""
    category: str
    """Category of the memory, one of MEMORY_CATEGORIES or UNNAMED_CATEGORIES."""
    phase: str | None = None
    """Phase in which it was allocated; None: before the recording."""
    module: str | None = None
    """Dotted name of the module in which it was allocated, such as blocks.3.attention; None: none, or not known."""
    op: str | None = None
    """Operator that allocated it, such as aten::mm; None: not known."""
    source: str | None = None
    """Python line that allocated it, such as `model.py:81 in forward`; None: no Python frame (the autograd engine)."""
    shape: tuple[int, ...] | None = None
    """Shape of the tensor that it was allocated for; None: not known."""
    dtype: str | None = None
    """Data type of that tensor, such as float32; None: not known."""
    at_peak: bool = False
    """Whether it was alive at the peak."""
    count: int = 1
    """Number of equal allocations (same size, category, phase, source, and module apart from layer numbers)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensors:
    """A group of equal tensors that autograd saved for the backward pass."""

    module: str
    """Module in whose forward pass they were saved, with layer numbers replaced, such as blocks.*.attention; '' outside
    of any module."""
    op: str
    """Backward node of the operator that saved them, such as MmBackward0."""
    shape: tuple[int, ...]
    """Shape of each tensor."""
    dtype: str
    """Data type of each tensor, such as float32."""
    count: int
    """Number of tensors."""
    stored_bytes: int
    """Bytes of their storages that no earlier group holds: a tensor that is saved twice counts once, a parameter not at
    all."""
    category: str = "activations"
    """Category of the memory: activations, parameters, autocast_copies or inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMemory:
    """Memory of one Transformer block."""

    module: str
    """blocks.0"""
    saved_bytes: int
    """Bytes of activations saved for its backward pass."""
    gradient_bytes: int | None = None
    """Bytes of its parameters' gradients after its backward pass; None without a backward pass."""
    input_bytes: int | None = None
    """Bytes of its input, one tensor of the residual stream; None: not known."""
    input_shape: tuple[int, ...] | None = None
    """Shape of that input."""
    input_dtype: str | None = None
    """Data type of that input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """The entries that a list of this record was too long to hold."""

    count: int
    """Number of entries left out."""
    num_bytes: int
    """Bytes of these entries together."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MemoryProfile:
    """The memory of one watched step."""

    source: str
    """Source of the figures. cuda allocator: its own history. cpu allocator: its reports to torch's profiler, since it
    keeps no history. snapshot: an imported memory snapshot."""
    peak_bytes: int
    """Most bytes allocated at once, the sum of the values of `at_peak`."""
    at_peak: dict[str, int]
    """Bytes by category at the peak, including rounding."""
    peak_s: float
    """Time of the peak, on the timeline's axis."""
    peak_phase: str | None = None
    """Phase of the peak; None: not known."""
    peak_module: str | None = None
    """Module that ran at the peak, in its forward pass or its recomputation; None: none, or not known."""
    peak_op: str | None = None
    """Operator whose allocation reached the peak; None: not known."""
    peak_source: str | None = None
    """Python line of that allocation; None: not known."""
    counted_peak_bytes: int | None = None
    """The allocator's own high-water mark over the same step; None if it keeps none."""
    unwatched_peak_bytes: int | None = None
    """The allocator's high-water mark over the timed steps, which were not watched; None: not known."""
    reserved_bytes: int | None = None
    """Most bytes that the allocator reserved on the device; what exceeds the peak was cached or fragmented."""
    outside_bytes: int | None = None
    """Bytes in use on the device outside of the allocator: context, libraries, NCCL, other processes."""
    timeline: MemoryTimeline
    """Allocated bytes by category over time."""
    phases: tuple[MemoryPhase, ...] = ()
    """Phases of the step in order; empty for a snapshot."""
    largest: tuple[Allocation, ...] = ()
    """The largest groups of allocations alive at the peak, then other large groups; in each part the largest first."""
    saved: tuple[SavedTensors, ...] = ()
    """The tensors that autograd saved, most bytes first; empty if there are none, or they could not be read."""
    saved_left_out: LeftOut | None = None
    """Groups of saved tensors that `saved` leaves out; None: none."""
    blocks: tuple[BlockMemory, ...] = ()
    """The first Transformer block, and each kind of block that differs from it."""
    blocks_left_out: LeftOut | None = None
    """Kinds of block that `blocks` leaves out, with the saved bytes of one block of each; None: none."""
    num_events: int = 0
    """Number of recorded allocations and releases."""
    device: str | None = None
    """The device of the history, such as 'cuda:0'; None if there is only one."""
    device_name: str | None = None
    """Name of the device; None: not known."""
    file: str | None = None
    """Name of the imported file; None: the step was measured here."""
    notes: tuple[str, ...] = field(default=())
    """What is missing, and why."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} by {self.source}: {format_bytes(self.peak_bytes)} at the peak>"

    @property
    def phase_peaks(self) -> dict[str, int]:
        """Peak bytes of each phase by name, in order; the highest, for a phase that runs several times in a step."""
        found: dict[str, int] = {}
        for phase in self.phases:
            found[phase.name] = max(found.get(phase.name, 0), phase.peak_bytes)
        return found

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        categories = {*MEMORY_CATEGORIES, *UNNAMED_CATEGORIES}
        for category in self.at_peak:
            yield from known(".at_peak", category, categories)
        if (total := sum(self.at_peak.values())) != self.peak_bytes:
            yield ".at_peak", f"sums to {total} bytes, but the peak is {self.peak_bytes}"
        for name in ("largest", "saved"):
            for index, group in enumerate(getattr(self, name)):
                yield from known(f".{name}[{index}].category", group.category, categories)
                if group.count < 1:
                    yield f".{name}[{index}].count", "must be at least 1, not 0"
        for index, phase in enumerate(self.phases):
            if phase.end_s < phase.start_s:
                yield f".phases[{index}]", f"ends at {phase.end_s} s, before it starts at {phase.start_s} s"
