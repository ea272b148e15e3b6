"""Marks: facts about the memory of a watched step beyond the allocator's history.

`measurement.memory.recorder` writes them next to a snapshot, `reading.snapshots.digest` reads them. Position n lies
after the n-th `alloc` event and before the next, so marks and history match exactly, without clocks.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

MARKS_SCHEMA = "steplab.memory_marks/1"
BLOCK_ACTIONS = ("alloc", "free_requested", "free_completed")
"""Events that allocate or release memory, by torch's names; `history_digest` encodes the index."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A non-negative number of 64 bits; readers of the file enforce it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A phase, module call or operator between two positions."""

    name: str
    start: Natural
    end: Natural
    in_backward: bool = False
    """True for a module's forward call inside the backward pass (activation checkpointing)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    address: Natural
    position: Natural
    """Position of the tensor at that address; identifies the allocation."""
    category: str
    """parameters, gradients, optimizer_state, inputs or autocast_copies."""
    name: str | None = None
    """Dotted parameter name, also for its gradient; None: neither, or unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """An operator's result in newly allocated memory."""

    address: Natural
    position: Natural
    op: str
    shape: tuple[Natural, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A tensor saved by autograd for backward."""

    address: Natural
    position: Natural
    module: str
    """Innermost running module, '' for none. For a tensor outside autograd's graph: the block with this input, else the
    module that made it.
    """
    op: str
    """Backward node, such as MmBackward0; '' if checkpointing or the model holds it."""
    shape: tuple[Natural, ...]
    dtype: str
    storage_bytes: Natural
    """Bytes of the whole storage; the tensor may be a view."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    device_index: Natural = 0
    source: str = "cuda allocator"
    phases: tuple[Stretch, ...] = ()
    modules: tuple[Stretch, ...] = ()
    operators: tuple[Stretch, ...] = ()
    """Operators that allocated; empty for a compiled step."""
    owned: tuple[Owned, ...] = ()
    made: tuple[Made, ...] = ()
    """Outputs of operators that allocated; empty for a compiled step."""
    saved: tuple[Saved, ...] = ()
    block_bytes: tuple[Natural, ...] = ()
    """Bytes reserved per `alloc` event, in order: the high-water mark counts these, and the history lacks them. Empty:
    unknown.
    """
    block_inputs: dict[str, tuple[tuple[Natural, ...], str]] = field(default_factory=dict)
    """Shape and dtype of the first argument of each ModuleList item, by dotted name."""
    counted_peak_bytes: Natural | None = None
    reserved_bytes: Natural | None = None
    outside_bytes: int | None = None
    notes: tuple[str, ...] = ()
    history_sha256: str | None = None
    """`history_digest` of the matching history; None in old files."""
    schema: str = field(default=MARKS_SCHEMA)


def history_digest(actions: bytes, addresses: bytes, sizes: bytes) -> str:
    """SHA-256 of a device's history in hexadecimal, which links marks to it.

    It covers the events in BLOCK_ACTIONS, in order: one byte of action, then address and requested size, eight
    little-endian bytes each.
    """
    return hashlib.sha256(b"".join((actions, addresses, sizes))).hexdigest()
