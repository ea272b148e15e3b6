"""What the process that ran a watched step knows of its memory, and the allocator's history does not.

Written beside a snapshot by `measurement.memory_recorder`, read by `snapshots.digest`. A *position* is a number of
allocations: position n lies after the n-th `alloc` event of the history and before the next, so that marks and history
meet exactly, whatever the clocks say.
"""

import hashlib
from dataclasses import dataclass, field

MARKS_SCHEMA = "steplab.memory_marks/1"
BLOCK_ACTIONS = ("alloc", "free_requested", "free_completed")
"""Events that make or release memory, by torch's names; `history_digest` knows each by its place here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Something that was under way between two positions."""

    name: str
    """A phase; or a module's dotted name; or an operator's name (aten::mm)."""
    start: int
    """Position at its beginning."""
    end: int
    """Position at its end."""
    in_backward: bool = False
    """For a module: whether this forward call ran inside the backward pass (activation checkpointing)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """A piece of memory whose owner is known."""

    address: int
    """Of the tensor's storage."""
    position: int
    """When it was at that address: the allocation is the one alive there then."""
    category: str
    """parameters, gradients, optimizer_state, inputs, autocast_copies."""
    name: str | None = None
    """Dotted name of the parameter that it is, or is the gradient of; None: of none, or not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A tensor that an operator returned in fresh memory."""

    address: int
    """Of its storage."""
    position: int
    """Right after its allocation."""
    op: str
    """aten::mm"""
    shape: tuple[int, ...]
    """Of the tensor."""
    dtype: str
    """float32, bfloat16, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A tensor that autograd kept for backward."""

    address: int
    """Of its storage."""
    position: int
    """When it was kept."""
    module: str
    """Innermost module under way, '' for none; of what no node keeps, the block whose input it is, or else the module
    that made it."""
    op: str
    """Name of the backward node, MmBackward0; '' where none keeps it, but checkpointing, or the model itself."""
    shape: tuple[int, ...]
    """Of the tensor."""
    dtype: str
    """float32, bfloat16, ..."""
    storage_bytes: int
    """Size of the whole storage, of which the tensor may be a view."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Everything the recorder wrote down."""

    device_index: int = 0
    """Which of the snapshot's device_traces."""
    source: str = "cuda allocator"
    """As MemoryProfile.source."""
    phases: tuple[Stretch, ...] = ()
    """In their order."""
    modules: tuple[Stretch, ...] = ()
    """Forward calls of modules, outer before inner."""
    operators: tuple[Stretch, ...] = ()
    """Operators that allocated; empty for a compiled step."""
    owned: tuple[Owned, ...] = ()
    """Parameters, gradients, ..."""
    made: tuple[Made, ...] = ()
    """Outputs of operators that allocated; empty for a compiled step."""
    saved: tuple[Saved, ...] = ()
    """In the order they were kept."""
    block_bytes: tuple[int, ...] = ()
    """What the allocator set aside for each `alloc` event of the history, in order: what its high-water mark counts,
    and the history itself does not say. Empty where not known."""
    block_inputs: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Shape and dtype of the first argument of each module that is an item of a ModuleList, by dotted name."""
    counted_peak_bytes: int | None = None
    """As in MemoryProfile."""
    reserved_bytes: int | None = None
    """As in MemoryProfile."""
    outside_bytes: int | None = None
    """As in MemoryProfile."""
    notes: tuple[str, ...] = ()
    """What could not be watched."""
    history_sha256: str | None = None
    """`history_digest` of the history that they are of; None in files of before this was written."""
    schema: str = field(default=MARKS_SCHEMA)
    """Format of this file."""


def history_digest(actions: bytes, addresses: bytes, sizes: bytes) -> str:
    """SHA-256 of a device's history, by which marks know it again; in hexadecimal digits.

    Of the events in BLOCK_ACTIONS, in order: a byte each for the action, and for address and size (bytes asked for)
    eight each, the lowest first.
    """
    return hashlib.sha256(b"".join((actions, addresses, sizes))).hexdigest()
