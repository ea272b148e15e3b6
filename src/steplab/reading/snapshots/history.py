"""The allocator's history as columns: events in order, and memory held at the snapshot.

1 GB holds millions of events; their few stacks are stored once. Addresses, sizes and times are int64.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Codes = NDArray[np.int8]
Numbers = NDArray[np.int32]
Flags = NDArray[np.bool_]

NONE = -1

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
"""Kinds of events by torch's names; the index is the code."""

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(8)
OTHER = len(ACTIONS)

INACTIVE, ALLOCATED, AWAITING_FREE = range(3)
"""States of a block: free; in use; released while another stream may use it."""

Frame = tuple[str, int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    action: Codes
    address: Integers
    """Address of the block or segment; NONE without either."""
    size_bytes: Integers
    """Requested bytes of a block, or bytes of a segment; NONE without either."""
    stream: Integers
    time_us: Integers
    stack: Numbers

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    address: Integers
    size_bytes: Integers
    is_expandable: Flags


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Pieces of segments at the end, also free ones."""

    address: Integers
    size_bytes: Integers
    """Bytes set aside by the allocator."""
    requested_bytes: Integers
    state: Codes
    stack: Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHistory:
    index: int
    events: Events
    segments: Segments
    blocks: Blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    max_split_bytes: int | None = None
    """Blocks of at least this size are never split; None: all may be."""
    expandable_segments: bool = False
    roundup_divisions: tuple[int, ...] = ()
    """Steps per power of two from 1 MiB on; sizes round up to them. 0: no rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    devices: tuple[DeviceHistory, ...]
    stacks: tuple[tuple[Frame, ...], ...]
    """Different stacks, innermost frame first."""
    settings: AllocatorSettings = field(default=AllocatorSettings())
