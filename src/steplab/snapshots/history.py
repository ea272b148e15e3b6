"""The allocator's history as columns: what happened, in order, and what was held when the snapshot was taken.

A snapshot of 1 GB has millions of events; their stacks are few and kept once. Addresses, sizes and times are int64.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Codes = NDArray[np.int8]
Numbers = NDArray[np.int32]
Flags = NDArray[np.bool_]

NONE = -1
"""In a column: the snapshot does not say."""

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
"""What an event can be, by torch's names; its code is the place here."""

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(8)
OTHER = len(ACTIONS)
"""Code of an action that this version does not know."""

INACTIVE, ALLOCATED, AWAITING_FREE = range(3)
"""States of a block: free; in use; given back, but another stream may still use it."""

Frame = tuple[str, int, str]
"""File name, line, and name of the function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    """What the allocator did, oldest first."""

    action: Codes
    """Place in ACTIONS, or OTHER."""
    address: Integers
    """Of the block, or of the segment; NONE for an event that is of neither."""
    size_bytes: Integers
    """Of a block what was asked for; of a segment what was taken from the device; NONE for an event of neither."""
    stream: Integers
    time_us: Integers
    """Microseconds since 1970; NONE where the snapshot has no times."""
    stack: Numbers
    """Number in History.stacks."""

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Memory held from the device at the end."""

    address: Integers
    size_bytes: Integers
    is_expandable: Flags
    """Whether it grows by mapping pages, instead of having been taken at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Pieces of the segments at the end, free ones too."""

    segment: Integers
    """Number of its segment."""
    address: Integers
    size_bytes: Integers
    """What the allocator set aside."""
    requested_bytes: Integers
    """What was asked for."""
    state: Codes
    """INACTIVE, ALLOCATED or AWAITING_FREE."""
    stack: Numbers
    """Number in History.stacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHistory:
    """One device's allocator."""

    index: int
    """Of the device."""
    events: Events
    segments: Segments
    blocks: Blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """What decides how large a block is made."""

    max_split_bytes: int | None = None
    """Blocks of at least this size are never split; None: all may be."""
    expandable_segments: bool = False
    """Whether segments grow by mapping pages."""
    roundup_divisions: tuple[int, ...] = ()
    """Into how many steps each power of two from 1 MiB on is divided, to which sizes are rounded up; 0: to none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """A snapshot."""

    devices: tuple[DeviceHistory, ...]
    """Those that had any memory, by index."""
    stacks: tuple[tuple[Frame, ...], ...]
    """Each different stack once, innermost frame first."""
    settings: AllocatorSettings = field(default=AllocatorSettings())
    """As they were when the snapshot was taken."""
