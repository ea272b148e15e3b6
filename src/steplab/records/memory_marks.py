"""Marks: what the process of a watched step knows about its memory beyond the allocator's history.

Written beside a snapshot by `measurement.memory.recorder`, read by `reading.snapshots.digest`. A *position* is a number
of allocations: position n lies after the n-th `alloc` event of the history and before the next, so that marks and
history can be matched exactly, without clocks.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

MARKS_SCHEMA = "steplab.memory_marks/1"
BLOCK_ACTIONS = ("alloc", "free_requested", "free_completed")
"""Events that allocate or release memory, by torch's names; `history_digest` encodes each by its index here."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of 64 bits that is not negative, which readers of the file hold it to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A phase, module call or operator that ran between two positions."""

    name: str
    """Name of the phase, dotted name of the module, or name of the operator (aten::mm)."""
    start: Natural
    """Position at which it began."""
    end: Natural
    """Position at which it ended."""
    in_backward: bool = False
    """For a module: whether this forward call ran inside the backward pass (activation checkpointing)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """A piece of memory whose owner is known."""

    address: Natural
    """Address of the tensor's storage."""
    position: Natural
    """Position at which the tensor was at that address, which identifies the allocation."""
    category: str
    """Owner: parameters, gradients, optimizer_state, inputs or autocast_copies."""
    name: str | None = None
    """Dotted name of the parameter that it is, or is the gradient of; None: neither, or not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A tensor that an operator returned in newly allocated memory."""

    address: Natural
    """Address of its storage."""
    position: Natural
    """Position right after its allocation."""
    op: str
    """Name of the operator, such as aten::mm."""
    shape: tuple[Natural, ...]
    """Shape of the tensor."""
    dtype: str
    """Data type of the tensor, such as float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A tensor that autograd saved for the backward pass."""

    address: Natural
    """Address of its storage."""
    position: Natural
    """Position at which it was saved."""
    module: str
    """Innermost module that was running, '' for none; for a tensor that no node of autograd's graph saves, the block
    whose input it is, or else the module that made it."""
    op: str
    """Name of the backward node that saved it, such as MmBackward0; '' if checkpointing or the model itself holds
    it."""
    shape: tuple[Natural, ...]
    """Shape of the tensor."""
    dtype: str
    """Data type of the tensor, such as float32."""
    storage_bytes: Natural
    """Size in bytes of the whole storage, of which the tensor may be a view."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Everything that the recorder noted about one watched step."""

    device_index: Natural = 0
    """Index into the snapshot's device_traces."""
    source: str = "cuda allocator"
    """Source of the history, as in MemoryProfile.source."""
    phases: tuple[Stretch, ...] = ()
    """Phases of the step, in order."""
    modules: tuple[Stretch, ...] = ()
    """Forward calls of modules, outer modules before inner ones."""
    operators: tuple[Stretch, ...] = ()
    """Operators that allocated; empty for a compiled step."""
    owned: tuple[Owned, ...] = ()
    """Memory whose owner is known, such as parameters and gradients."""
    made: tuple[Made, ...] = ()
    """Outputs of operators that allocated; empty for a compiled step."""
    saved: tuple[Saved, ...] = ()
    """Saved tensors, in the order they were saved."""
    block_bytes: tuple[Natural, ...] = ()
    """Bytes that the allocator reserved for each `alloc` event of the history, in order. Its high-water mark counts
    these, and the history does not contain them. Empty if they are not known."""
    block_inputs: dict[str, tuple[tuple[Natural, ...], str]] = field(default_factory=dict)
    """Shape and dtype of the first argument of each module that is an item of a ModuleList, by dotted name."""
    counted_peak_bytes: Natural | None = None
    """The allocator's own high-water mark, as MemoryProfile.counted_peak_bytes."""
    reserved_bytes: Natural | None = None
    """Most bytes that the allocator reserved, as MemoryProfile.reserved_bytes."""
    outside_bytes: int | None = None
    """Memory in use outside of the allocator, as MemoryProfile.outside_bytes."""
    notes: tuple[str, ...] = ()
    """What could not be watched."""
    history_sha256: str | None = None
    """`history_digest` of the history that the marks belong to; None in old files."""
    schema: str = field(default=MARKS_SCHEMA)
    """Format of this file."""


def history_digest(actions: bytes, addresses: bytes, sizes: bytes) -> str:
    """SHA-256 of a device's history in hexadecimal digits, by which marks identify it.

    It covers the events in BLOCK_ACTIONS, in order: one byte for the action, and eight bytes each for the address and
    the requested size, in little-endian order.
    """
    return hashlib.sha256(b"".join((actions, addresses, sizes))).hexdigest()
