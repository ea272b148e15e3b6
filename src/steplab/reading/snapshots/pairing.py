"""Makes pieces of memory from events by pairing each release with its allocation.

The allocator counts memory as allocated from `alloc` until `free_requested`. Until `free_completed`, which comes later
only if another stream still uses the block, the block is not reused (CUDACachingAllocator.cpp, `free` and
`free_block`). For a history without requests the completions are used.
"""

from dataclasses import dataclass

import numpy as np

from steplab.reading.snapshots.history import (
    ALLOC,
    ALLOCATED,
    AWAITING_FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    NONE,
    Blocks,
    DeviceHistory,
    Events,
    Flags,
    Integers,
    Numbers,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Pieces of memory: those from before the history first, then in the order of their allocations."""

    address: Integers
    requested_bytes: Integers
    """Requested size in bytes."""
    start: Integers
    """The event that allocated it; -1 if it existed before the first event."""
    end: Integers
    """The event that released it; the number of events if it still existed after the last."""
    stack: Numbers
    """The number of the stack of its allocation in History.stacks; NONE if unknown."""

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired(Pieces):
    """Pieces of memory, made from events."""

    block: Integers
    """Its number among the blocks held at the end; NONE if it was released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Awaited:
    """Memory that was released before the history began, and could not be reused for some time of it."""

    address: Integers
    requested_bytes: Integers


def pair(device: DeviceHistory) -> tuple[Paired, Awaited]:
    """All pieces of memory of a device."""
    events, blocks = device.events, device.blocks
    rows = _by_address(events)
    action, address = events.action[rows], events.address[rows]
    first = np.append(True, address[1:] != address[:-1])[: len(rows)]
    # Where requests are recorded, no completion follows the allocation itself.
    straight = ~first[1:] & (action[:-1] == ALLOC) & (action[1:] == FREE_COMPLETED)
    released_by = FREE_COMPLETED if straight.any() else FREE_REQUESTED
    made, lost = np.flatnonzero(action == ALLOC), np.flatnonzero(first & (action == released_by))
    ends: Integers = np.full(len(rows), len(events))
    ends[:-1] = np.where(
        first[1:], len(events), rows[1:]
    )  # the next event at this address: a block is handed out only once
    made = made[np.argsort(rows[made])]
    kept = np.flatnonzero(~np.isin(blocks.address, address) & (blocks.state == ALLOCATED))
    survivors = np.where(ends[made] == len(events), _numbers(blocks, address[made]), NONE)
    pieces = Paired(
        address=np.concatenate((blocks.address[kept], address[lost], address[made])),
        requested_bytes=np.concatenate((blocks.requested_bytes[kept], *_sizes(events, rows[lost], rows[made]))),
        start=np.concatenate((np.full(len(kept) + len(lost), NONE), rows[made])),
        end=np.concatenate((np.full(len(kept), len(events)), rows[lost], ends[made])),
        # The stack of a release is that of the releasing code, unless the history was recorded otherwise.
        stack=np.concatenate((blocks.stack[kept], np.full(len(lost), NONE, dtype=np.int32), events.stack[rows[made]])),
        block=np.concatenate((kept, np.full(len(lost), NONE), survivors)),
    )
    # A completion whose request is not in the history is of memory that no longer counted when it began.
    completed = first & (action == FREE_COMPLETED) & (released_by == FREE_REQUESTED)
    waiting = ~np.isin(blocks.address, address) & (blocks.state == AWAITING_FREE)
    return pieces, Awaited(
        address=np.concatenate((address[completed], blocks.address[waiting])),
        requested_bytes=np.concatenate((events.size_bytes[rows[completed]], blocks.requested_bytes[waiting])),
    )


def _by_address(events: Events) -> Integers:
    """The numbers of the events that allocate or release memory, in the order of their addresses and, at each, of
    time."""
    relevant = np.flatnonzero(events.action <= FREE_COMPLETED)
    order: Integers = relevant[np.argsort(events.address[relevant], kind="stable")]
    return order


def _sizes(events: Events, *rows: Integers) -> list[Integers]:
    return [events.size_bytes[chosen] for chosen in rows]


def _numbers(blocks: Blocks, addresses: Integers) -> Integers:
    """The number of the allocated block at each address, NONE for none."""
    allocated = np.flatnonzero(blocks.state == ALLOCATED)
    if not len(allocated):
        return np.full(len(addresses), NONE)
    allocated = allocated[np.argsort(blocks.address[allocated], kind="stable")]
    place = np.minimum(np.searchsorted(blocks.address[allocated], addresses), len(allocated) - 1)
    there: Flags = blocks.address[allocated[place]] == addresses
    return np.where(there, allocated[place], NONE)
