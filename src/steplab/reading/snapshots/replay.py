"""Makes lifetimes from a history: every piece of memory with its size, its beginning and its end.

Memory from before the history has no allocation in it, but is found from its other end: it is either held after the
last event without having been allocated, or released without that. A history from a ring buffer, which lost its oldest
events, is read in the same way.
"""

from dataclasses import dataclass, field, fields

import numpy as np

from steplab.reading.snapshots.allocator import (
    OVERSIZE_BYTES,
    SEGMENT_BYTES,
    SMALL_POOL_BYTES,
    SMALLEST_BYTES,
    LargePool,
    rounded_sizes,
)
from steplab.reading.snapshots.history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    NONE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    AllocatorSettings,
    DeviceHistory,
    Integers,
)
from steplab.reading.snapshots.pairing import Awaited, Paired, Pieces, pair
from steplab.units import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetimes(Pieces):
    """Pieces of memory with the blocks that were set aside for them."""

    block_bytes: Integers
    """Size of the block in bytes; the sum over live blocks is the allocator's `allocated_bytes`."""
    num_events: int
    """The number of events of the history."""
    notes: tuple[str, ...] = field(default=())
    """What is uncertain, in words."""


def replay(device: DeviceHistory, settings: AllocatorSettings) -> Lifetimes:
    """The lifetimes in one device's history."""
    pieces, awaited = pair(device)
    rounded = rounded_sizes(pieces.requested_bytes, settings)
    notes = list[str]()
    if not _has_segments(device):
        blocks = pieces.requested_bytes
    elif _grows(device, settings):
        blocks = rounded
    else:
        blocks, notes = _divided(device, settings, pieces, awaited, rounded)
    held = pieces.block != NONE
    blocks = np.where(held, device.blocks.size_bytes[pieces.block * held], blocks) if held.any() else blocks
    too_small = blocks < pieces.requested_bytes  # no allocator does that, but the file may not be an allocator's
    if too_small.any():
        blocks = np.where(too_small, rounded, blocks)
        notes.append(
            f"sizes: in the snapshot {counted(int(too_small.sum()), 'block')} would be smaller than requested; the "
            "requested sizes, rounded up to 512 B, are used"
        )
    return Lifetimes(
        **{field.name: getattr(pieces, field.name) for field in fields(Pieces)},
        block_bytes=blocks,
        num_events=len(device.events),
        notes=tuple(notes),
    )


def reserved_peak_bytes(device: DeviceHistory) -> int | None:
    """The most bytes held from the device at once; None if no segment is known."""
    if not _has_segments(device):
        return None
    events = device.events
    taken = (events.action == SEGMENT_ALLOC) | (events.action == SEGMENT_MAP)
    given = (events.action == SEGMENT_FREE) | (events.action == SEGMENT_UNMAP)
    change = np.where(taken, events.size_bytes, np.where(given, -events.size_bytes, 0))
    # The state after the last event is known; undoing the events gives the state before the first.
    later = np.cumsum(change[::-1])
    return int(device.segments.size_bytes.sum() - min(0, int(later.min(initial=0))))


def _has_segments(device: DeviceHistory) -> bool:
    """Whether this is the history of a caching allocator. Others have no segments, or none that they allocate as it
    does."""
    size_bytes = device.segments.size_bytes
    if len(size_bytes):
        return bool(((size_bytes >= SEGMENT_BYTES) & (size_bytes % SMALLEST_BYTES == 0)).all())
    return bool(np.isin(device.events.action, (SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP)).any())


def _grows(device: DeviceHistory, settings: AllocatorSettings) -> bool:
    """Whether segments grow by pages; blocks are then always cut to size."""
    mapped = device.segments.is_expandable.any() or (device.events.action == SEGMENT_MAP).any()
    return settings.expandable_segments or bool(mapped)


def _divided(
    device: DeviceHistory, settings: AllocatorSettings, pieces: Paired, awaited: Awaited, rounded: Integers
) -> tuple[Integers, list[str]]:
    """The sizes of the blocks, with the large pool followed from event to event; and what is uncertain."""
    sizes = rounded.copy()
    pool = LargePool(settings)
    unsure = _begin(pool, device, settings, pieces, awaited, sizes)
    events = device.events
    # Without recorded completions, a block can be reused from its release request on.
    released_by = FREE_COMPLETED if np.any(events.action == FREE_COMPLETED) else FREE_REQUESTED
    large = rounded_sizes(events.size_bytes, settings) > SMALL_POOL_BYTES
    moves = np.isin(events.action, (SEGMENT_ALLOC, SEGMENT_FREE))
    rows = np.flatnonzero(moves | (large & np.isin(events.action, (ALLOC, released_by))))
    number_of = dict(zip(pieces.start.tolist(), range(len(pieces)), strict=True))
    unknown = 0
    columns = (rows, events.action[rows], events.address[rows], events.size_bytes[rows])
    for row, action, address, size in zip(*(column.tolist() for column in columns), strict=True):
        if action == ALLOC:
            number = number_of[row]
            found = pool.allocate(address, int(rounded[number]), number)
            unknown += found is None
            sizes[number] = found or rounded[number]
        elif action == SEGMENT_ALLOC:
            pool.add_segment(address, size)
        elif action == SEGMENT_FREE:
            pool.remove_segment(address)
        else:
            pool.release(address)
    for number, size in pool.corrected.items():
        sizes[number] = size
    return sizes, _notes(len(unsure - pool.corrected.keys()), unknown)


def _begin(
    pool: LargePool,
    device: DeviceHistory,
    settings: AllocatorSettings,
    pieces: Paired,
    awaited: Awaited,
    sizes: Integers,
) -> set[int]:
    """Lay the segments out as they were before the first event, and set the sizes of the blocks in them.

    Returns the numbers of the pieces whose block sizes were assumed.
    """
    unsure = set[int]()
    old = np.flatnonzero((pieces.start == NONE) & (sizes > SMALL_POOL_BYTES))
    addresses = np.concatenate((pieces.address[old], awaited.address))
    ends = addresses + np.concatenate((sizes[old], rounded_sizes(awaited.requested_bytes, settings)))
    exact = np.concatenate((pieces.block[old], np.full(len(awaited.address), NONE)))
    numbers = np.concatenate((old, np.full(len(awaited.address), NONE)))
    ends = np.where(exact != NONE, addresses + _block_sizes(device, exact), ends)
    order = np.argsort(addresses)
    addresses, ends, numbers, exact = addresses[order], ends[order], numbers[order], exact[order]
    for start, size in _segments_before(device).items():
        first, stop = np.searchsorted(addresses, (start, start + size))
        found = list[tuple[int, int, int]]()
        limits = [*addresses[first + 1 : stop].tolist(), start + size]
        for row, limit in zip(range(first, stop), limits, strict=stop > first):
            begin, end, number = int(addresses[row]), int(ends[row]), int(numbers[row])
            if exact[row] == NONE:
                # No block of the large pool is as small as such a gap, so it belongs to the piece before it.
                oversize = settings.max_split_bytes is not None and end - begin >= settings.max_split_bytes
                if limit - end <= (OVERSIZE_BYTES if oversize else SMALL_POOL_BYTES):
                    end = limit
                elif number != NONE:
                    unsure.add(number)
                if number != NONE:
                    sizes[number] = end - begin
            found.append((begin, end, number))
        pool.divide(start, size, found)
    return unsure


def _block_sizes(device: DeviceHistory, numbers: Integers) -> Integers:
    """The sizes of blocks held at the end, by number; 0 for none."""
    if not len(device.blocks.size_bytes):
        return np.zeros(len(numbers), dtype=np.int64)
    return np.where(numbers == NONE, 0, device.blocks.size_bytes[np.maximum(numbers, 0)])


def _segments_before(device: DeviceHistory) -> dict[int, int]:
    """Start and size of the segments held before the first event: those held at the end, with the events undone."""
    events, segments = device.events, device.segments
    held = dict(zip(segments.address.tolist(), segments.size_bytes.tolist(), strict=True))
    rows = np.flatnonzero(np.isin(events.action, (SEGMENT_ALLOC, SEGMENT_FREE)))[::-1]
    columns = (events.action[rows], events.address[rows], events.size_bytes[rows])
    for action, address, size in zip(*(column.tolist() for column in columns), strict=True):
        if action == SEGMENT_ALLOC:
            held.pop(address, None)
        else:
            held[address] = size
    return held


def _notes(unsure: int, unknown: int) -> list[str]:
    notes = []
    if unsure:
        notes.append(f"sizes: {counted(unsure, 'block')} from before the history may be up to 1 MiB larger than shown")
    if unknown:
        notes.append(
            f"sizes: {counted(unknown, 'allocation')} began where the snapshot shows no free block; the "
            "requested sizes, rounded up to 512 B, are used"
        )
    return notes
