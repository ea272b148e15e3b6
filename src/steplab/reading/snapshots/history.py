"""Columns of the allocator's history: events in order, and memory held when the snapshot was taken. A snapshot of 1 GB
has millions of events but few stacks, each stored once. Addresses, sizes and times are int64.
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
"""Event kinds by torch's names; columns hold the index."""

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(8)
OTHER = len(ACTIONS)

INACTIVE, ALLOCATED, AWAITING_FREE = range(3)
"""Block states: free; in use; freed but still used by another stream."""

Frame = tuple[str, int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    action: Codes
    address: Integers
    """Address of the block or segment; NONE if the event has neither."""
    size_bytes: Integers
    """Requested bytes of a block, or bytes of a segment; NONE if the event has neither."""
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
    """Blocks within segments when the snapshot was taken, including free ones."""

    address: Integers
    size_bytes: Integers
    """Block size in the allocator, at least the requested bytes."""
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
    """Size from which blocks are never split; None: all may be."""
    expandable_segments: bool = False
    roundup_divisions: tuple[int, ...] = ()
    """Number of size steps per power of two from 1 MiB on; sizes round up to them. 0: no rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    devices: tuple[DeviceHistory, ...]
    stacks: tuple[tuple[Frame, ...], ...]
    """Distinct stacks, innermost frame first."""
    settings: AllocatorSettings = field(default=AllocatorSettings())
