"""The allocator's history as columns: the events in order, and the memory held when the snapshot was taken.

A snapshot of 1 GB has millions of events; their stacks are few and stored once. Addresses, sizes and times are int64.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Codes = NDArray[np.int8]
Numbers = NDArray[np.int32]
Flags = NDArray[np.bool_]

NONE = -1
"""The value in a column for what the snapshot does not contain."""

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
"""The kinds of events, by torch's names; the code of a kind is its place here."""

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(8)
OTHER = len(ACTIONS)
"""The code of an action that this version does not know."""

INACTIVE, ALLOCATED, AWAITING_FREE = range(3)
"""The states of a block: free; in use; released while another stream may still use it."""

Frame = tuple[str, int, str]
"""File name, line, and name of the function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    """The allocator's events, oldest first."""

    action: Codes
    """The place in ACTIONS, or OTHER."""
    address: Integers
    """The address of the block or the segment; NONE for an event without either."""
    size_bytes: Integers
    """The requested size of a block, or the size of a segment; NONE for an event without either."""
    stream: Integers
    time_us: Integers
    """Microseconds since 1970; NONE if the snapshot has no times."""
    stack: Numbers
    """The number of the stack in History.stacks."""

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """The memory held from the device at the end."""

    address: Integers
    size_bytes: Integers
    is_expandable: Flags
    """Whether a segment grows by mapping pages; otherwise it was allocated at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The pieces of the segments at the end, free ones included."""

    address: Integers
    size_bytes: Integers
    """The size that the allocator set aside."""
    requested_bytes: Integers
    """The requested size."""
    state: Codes
    """INACTIVE, ALLOCATED or AWAITING_FREE."""
    stack: Numbers
    """The number of the stack in History.stacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHistory:
    """The history of one device's allocator."""

    index: int
    """The index of the device."""
    events: Events
    segments: Segments
    blocks: Blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """The settings that decide the size of a block."""

    max_split_bytes: int | None = None
    """Blocks of at least this size are never split; None if all may be."""
    expandable_segments: bool = False
    """Whether segments grow by mapping pages."""
    roundup_divisions: tuple[int, ...] = ()
    """The number of steps into which each power of two from 1 MiB on is divided; sizes are rounded up to a step. 0
    for no rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """A snapshot."""

    devices: tuple[DeviceHistory, ...]
    """The devices that had any memory, by index."""
    stacks: tuple[tuple[Frame, ...], ...]
    """Each different stack once, innermost frame first."""
    settings: AllocatorSettings = field(default=AllocatorSettings())
    """The settings when the snapshot was taken."""
