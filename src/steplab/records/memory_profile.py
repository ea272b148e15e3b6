"""Memory of one step: the peak by category, memory over time, and the code that allocated.

The step is recorded after all timing. Sizes are those of the allocator's blocks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Annotated

import msgspec

from steplab.records.record import Positive, Problem, as_long, one_of
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
"""Owners of memory.

    parameters: with buffers
    gradients: of parameters
    activations: tensors from a forward pass, also a recomputed one, alive at its end for backward
    autocast_copies: weights cast once for all uses
    workspaces: library memory, such as cuBLAS's, allocated around the step without a tensor
    communication: gathered weights and message buffers, only in predictions
    temporaries: all else allocated in the step
    rounding: the allocator's additions to requested sizes
"""

MEASURED_CATEGORIES = tuple(name for name in MEMORY_CATEGORIES if name != "communication")
"""Categories of a measured step; its message buffers cannot be distinguished."""

UNNAMED_CATEGORIES = ("before", "during", "rounding")
"""Categories of a snapshot without marks. before, during: allocated before or in the recorded history. rounding: as in
MEMORY_CATEGORIES.
"""
Category = Annotated[str, one_of((*MEMORY_CATEGORIES, *UNNAMED_CATEGORIES))]

_DTYPE_BYTES = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
"""Bytes per element, by torch's dtype name."""


def tensor_bytes(shape: Iterable[int], dtype: str | None) -> int | None:
    """Bytes of a dense tensor; None for an unknown type."""
    size = _DTYPE_BYTES.get(dtype or "")
    return None if size is None else prod(shape) * size


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTimeline:
    """Allocated bytes by category over time, thinned for a chart; peaks remain."""

    time_s: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]
    """Ascending seconds since recording began, or event numbers if events lack times."""
    categories: tuple[Category, ...]
    allocated_bytes: tuple[tuple[int, ...], ...]
    """Per category, the bytes allocated from each time to the next."""
    by_event: bool = False

    def problems(self) -> Iterator[Problem]:
        if any(later < earlier for earlier, later in zip(self.time_s, self.time_s[1:], strict=False)):
            yield ".time_s", "does not ascend"
        yield from as_long(".allocated_bytes", self.allocated_bytes, len(self.categories), ".categories")
        for index, column in enumerate(self.allocated_bytes):
            yield from as_long(f".allocated_bytes[{index}]", column, len(self.time_s), ".time_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPhase:
    name: str
    start_s: float
    end_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A group of similar allocations; `count` names the common properties."""

    requested_bytes: int
    block_bytes: int
    """Block size in the allocator; the group's mean."""
    category: Category
    phase: str | None = None
    module: str | None = None
    """Dotted name of the allocating module, such as blocks.3.attention; None: none or unknown."""
    op: str | None = None
    source: str | None = None
    """Python line that allocated, such as `model.py:81 in forward`; None: no Python frame, as in autograd's engine."""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    at_peak: bool = False
    count: Positive = 1
    """Allocations with equal size, category, phase, source and module, regardless of layer numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensors:
    """A group of similar tensors saved by autograd for backward."""

    module: str
    """Module whose forward saved them, without layer numbers, such as blocks.*.attention; '': outside modules."""
    op: str
    shape: tuple[int, ...]
    dtype: str
    count: Positive
    stored_bytes: int
    """Bytes that no earlier group counts: a tensor that is saved twice counts once, a parameter never."""
    category: Category = "activations"
    """activations, parameters, autocast_copies or inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMemory:
    module: str
    saved_bytes: int
    """Bytes of activations that the block saves for backward."""
    gradient_bytes: int | None = None
    """Bytes of the block's gradients after its backward pass; None: no backward pass."""
    input_bytes: int | None = None
    """Bytes of the block's input, one residual-stream tensor; None: unknown."""
    input_shape: tuple[int, ...] | None = None
    input_dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    count: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MemoryProfile:
    source: str
    """cuda allocator: its history. cpu allocator: allocations by torch's profiler, for lack of a history. snapshot:
    imported.
    """
    peak_bytes: int
    at_peak: dict[Category, int]
    """Bytes by category at the peak; they sum to `peak_bytes`."""
    peak_s: float
    """Seconds of the peak, as in `timeline.time_s`."""
    peak_phase: str | None = None
    peak_module: str | None = None
    """Module in its forward or recomputation at the peak; None: none or unknown."""
    peak_op: str | None = None
    peak_source: str | None = None
    counted_peak_bytes: int | None = None
    """High-water mark of the recorded step by the allocator; None: it keeps none."""
    unwatched_peak_bytes: int | None = None
    """High-water mark of the timed steps, which were not recorded; None: unknown."""
    reserved_bytes: int | None = None
    """Most bytes that the allocator reserved; the excess over the peak was cached or fragmented."""
    outside_bytes: int | None = None
    """Device bytes outside the allocator: CUDA context, libraries, NCCL, other processes."""
    timeline: MemoryTimeline
    phases: tuple[MemoryPhase, ...] = ()
    largest: tuple[Allocation, ...] = ()
    """Groups alive at the peak, then other large groups, each by total bytes."""
    saved: tuple[SavedTensors, ...] = ()
    """Tensors saved by autograd, most bytes first; empty: none, or not readable."""
    saved_left_out: LeftOut | None = None
    blocks: tuple[BlockMemory, ...] = ()
    """The first Transformer block, then each further one whose memory differs from all before."""
    blocks_left_out: LeftOut | None = None
    """Number of different blocks that `blocks` omits, and their saved bytes; None: none."""
    num_events: int = 0
    device: str | None = None
    """Device of the history, such as 'cuda:0'; None: it covers only one."""
    device_name: str | None = None
    file: str | None = None
    """Name of the imported file; None: measured by steplab."""
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} by {self.source}: {format_bytes(self.peak_bytes)} at the peak>"

    @property
    def phase_peaks(self) -> dict[str, int]:
        """Peak bytes by phase, in order; for a repeated phase the highest."""
        found: dict[str, int] = {}
        for phase in self.phases:
            found[phase.name] = max(found.get(phase.name, 0), phase.peak_bytes)
        return found

    def problems(self) -> Iterator[Problem]:
        if (total := sum(self.at_peak.values())) != self.peak_bytes:
            yield ".at_peak", f"sums to {total} bytes, but the peak is {self.peak_bytes}"
        for index, phase in enumerate(self.phases):
            if phase.end_s < phase.start_s:
                yield f".phases[{index}]", f"ends at {phase.end_s} s, before it starts at {phase.start_s} s"
