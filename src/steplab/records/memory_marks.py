"""Marks: facts about a watched step's memory that the allocator's history lacks.

`measurement.memory.recorder` writes them next to a snapshot; `reading.snapshots.digest` reads them. Position n lies
between the n-th `alloc` event and the next, so no clock is needed to match them with the history.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

MARKS_SCHEMA = "steplab.memory_marks/1"
BLOCK_ACTIONS = ("alloc", "free_requested", "free_completed")
"""Allocator events, by torch's names, that `history_digest` covers; it encodes the index."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Non-negative 64-bit integer, checked on reading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Positions at which a phase, module call or operator begins and ends."""

    name: str
    start: Natural
    end: Natural
    in_backward: bool = False
    """True for a module's forward call that backward repeats (activation checkpointing)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    address: Natural
    position: Natural
    """A position at which the tensor is alive; with the address, it identifies the allocation."""
    category: str
    """parameters, gradients, optimizer_state, inputs or autocast_copies."""
    name: str | None = None
    """Dotted name of the parameter or of the gradient's parameter; None: neither, or unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Operator output in newly allocated memory."""

    address: Natural
    position: Natural
    op: str
    shape: tuple[Natural, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Tensor saved by autograd for backward."""

    address: Natural
    position: Natural
    module: str
    """Innermost module running when it was saved, or ''. If checkpointing or the model holds it: the block that has it
    as input, else the module that made it.
    """
    op: str
    """Backward node that saved it, such as MmBackward0; '' if checkpointing or the model holds it."""
    shape: tuple[Natural, ...]
    dtype: str
    storage_bytes: Natural
    """Bytes of the whole storage, of which the tensor may be a view."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    device_index: Natural = 0
    source: str = "cuda allocator"
    phases: tuple[Stretch, ...] = ()
    modules: tuple[Stretch, ...] = ()
    operators: tuple[Stretch, ...] = ()
    """Operators that allocated memory; empty for a compiled step."""
    owned: tuple[Owned, ...] = ()
    made: tuple[Made, ...] = ()
    """Outputs of operators that allocated memory; empty for a compiled step."""
    saved: tuple[Saved, ...] = ()
    block_bytes: tuple[Natural, ...] = ()
    """Block size per `alloc` event, in order, as the high-water mark counts it; the history lacks it. Empty: unknown.
    """
    block_inputs: dict[str, tuple[tuple[Natural, ...], str]] = field(default_factory=dict)
    """Shape and dtype of the first argument of each ModuleList item, by its dotted name."""
    counted_peak_bytes: Natural | None = None
    reserved_bytes: Natural | None = None
    outside_bytes: int | None = None
    notes: tuple[str, ...] = ()
    history_sha256: str | None = None
    """`history_digest` of the history that the marks belong to; None in old files."""
    schema: str = field(default=MARKS_SCHEMA)


def history_digest(actions: bytes, addresses: bytes, sizes: bytes) -> str:
    """SHA-256 in hexadecimal of a device's history, to match marks.

    It covers the events in BLOCK_ACTIONS, in order: a byte of action, then address and requested size, eight
    little-endian bytes each.
    """
    return hashlib.sha256(b"".join((actions, addresses, sizes))).hexdigest()
