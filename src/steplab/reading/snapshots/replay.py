"""Computes lifetimes from a history: size, beginning and end of every piece of memory.

Memory counts as allocated from `alloc` to `free_requested`. The block is reusable after `free_completed`, later only if
another stream uses it (CUDACachingAllocator.cpp, `free` and `free_block`). Without requests, completions count. Memory
allocated before the history is known by what follows: it is held at the end, or released without an `alloc` event.

Block sizes round up to 512 B. Blocks of the small pool, or of a growing segment, are cut to size. In the large pool
only a rest over 1 MiB is cut off. So large blocks are followed event by event, and each allocation must begin at a free
block (`round_size`, `should_split`, `alloc_found_block`, `free_block`, `try_merge_blocks`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import numpy as np

from steplab.reading.snapshots import history
from steplab.reading.snapshots.history import ALLOC, FREE_COMPLETED, FREE_REQUESTED, NONE, DeviceHistory, Integers
from steplab.units import KIB, MIB, counted

SMALLEST_BYTES = KIB // 2
"""Unit of all block sizes."""
SMALL_POOL_BYTES = MIB
"""Largest rounded size in the small pool. In the large pool, the largest remainder that is not split off."""
SEGMENT_BYTES = 2 * MIB
OVERSIZE_BYTES = 20 * MIB
"""Largest excess of an unsplit block over the request, in bytes."""


def rounded_sizes(requested_bytes: Integers, settings: history.AllocatorSettings) -> Integers:
    """Requested sizes rounded up as the allocator does before it looks for a block."""
    rounded = np.maximum(-(-requested_bytes // SMALLEST_BYTES), 1) * SMALLEST_BYTES
    if not any(settings.roundup_divisions):
        return rounded
    power = np.frexp(np.maximum(requested_bytes, 1).astype(np.float64))[1].astype(np.int64) - 1
    interval = np.clip(power - (MIB.bit_length() - 1), 0, len(settings.roundup_divisions) - 1)
    divisions = np.array(settings.roundup_divisions, dtype=np.int64)[interval]
    step = np.maximum((np.int64(1) << power) // np.maximum(divisions, 1), 1)
    in_steps = (divisions > 1) & (requested_bytes > SMALLEST_BYTES * divisions)
    return np.where(in_steps, -(-requested_bytes // step) * step, rounded)


class LargePool:
    """Division of large segments into blocks, updated event by event."""

    def __init__(self, settings: history.AllocatorSettings) -> None:
        self._most_split = settings.max_split_bytes
        self._free: dict[int, int] = {}
        self._free_before: dict[int, int] = {}
        self._used: dict[int, tuple[int, int]] = {}
        """End address and allocation number of each used block, by start address."""
        self._borders: set[int] = set()
        self.corrected: dict[int, int] = {}
        self._searches_left = 10_000

    def add_segment(self, start: int, size_bytes: int) -> None:
        self._borders.add(start)
        self._set_free(start, start + size_bytes)

    def remove_segment(self, start: int) -> None:
        if start in self._free:
            self._take_free(start)
        self._borders.discard(start)

    def divide(self, start: int, size_bytes: int, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Add a segment with the given (start, end, number) of its used blocks, by address; the rest is free."""
        self._borders.add(start)
        end = start + size_bytes
        for piece_start, piece_end, number in pieces:
            if start < piece_start:
                self._set_free(start, piece_start)
            self._used[piece_start] = (piece_end, number)
            start = piece_end
        if start < end:
            self._set_free(start, end)

    def allocate(self, start: int, rounded_bytes: int, number: int) -> int | None:
        """Return the block size of an allocation; None if the division at its address is unknown."""
        if start not in self._free and not self._correct(start):
            return None
        end = self._take_free(start)
        rest = end - start - rounded_bytes
        if rest < 0:
            self._set_free(start, end)
            return None
        if rest > SMALL_POOL_BYTES and (self._most_split is None or rounded_bytes < self._most_split):
            self._set_free(start + rounded_bytes, end)
            end = start + rounded_bytes
        self._used[start] = (end, number)
        return end - start

    def release(self, start: int) -> None:
        if start not in self._used:
            return
        end, _ = self._used.pop(start)
        if end in self._free and end not in self._borders:
            end = self._take_free(end)
        if start in self._free_before and start not in self._borders:
            start = self._free_before[start]
            self._take_free(start)
        self._set_free(start, end)

    def _correct(self, start: int) -> bool:
        """Correct the assumed size of the block before `start`, so that a free block begins there. Returns False if no
        block reaches `start`, or its size would be implausible.
        """
        self._searches_left -= 1
        if self._searches_left < 0:
            return False
        for free_start, free_end in self._free.items():
            if free_start < start < free_end:
                before = [(begin, number) for begin, (end, number) in self._used.items() if end == free_start]
                if not before or start - free_start > OVERSIZE_BYTES:
                    return False
                self._take_free(free_start)
                self._settle(*before[0], start, free_end)
                return True
        for begin, (end, number) in self._used.items():
            if begin < start < end:
                self._settle(begin, number, start, end)
                return True
        return False

    def _settle(self, begin: int, number: int, border: int, end: int) -> None:
        self._used[begin] = (border, number)
        self.corrected[number] = border - begin
        self._set_free(border, end)

    def _set_free(self, start: int, end: int) -> None:
        if start in self._free:  # overlapping segments, impossible in an allocator
            self._take_free(start)
        if end in self._free_before:
            self._take_free(self._free_before[end])
        self._free[start] = end
        self._free_before[end] = start

    def _take_free(self, start: int) -> int:
        end = self._free.pop(start)
        del self._free_before[end]
        return end


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Allocations as columns: those before the history first, then in order of events."""

    address: Integers
    requested_bytes: Integers
    start: Integers
    """Index of the allocating event; -1: before the history."""
    end: Integers
    """Index of the releasing event; the number of events if never released."""
    stack: history.Numbers
    """Index into History.stacks of the allocation; NONE: unknown."""

    def __len__(self) -> int:
        return len(self.address)

    def alive_at(self, moment: int) -> history.Flags:
        alive: history.Flags = (self.start < moment) & (self.end >= moment)
        return alive


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired(Pieces):
    block: Integers
    """Index among the blocks held at the end; NONE: released earlier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Awaited:
    """Blocks released before the history, but reusable only during it or later, because another stream used them."""

    address: Integers
    requested_bytes: Integers


def pair(device: DeviceHistory) -> tuple[Paired, Awaited]:
    events, blocks = device.events, device.blocks
    rows = np.flatnonzero(events.action <= FREE_COMPLETED)
    rows = rows[np.argsort(events.address[rows], kind="stable")]
    action, address, size_bytes = events.action[rows], events.address[rows], events.size_bytes[rows]
    first = np.append(True, address[1:] != address[:-1])[: len(rows)]
    # Where requests are recorded, no completion directly follows an allocation.
    straight = ~first[1:] & (action[:-1] == ALLOC) & (action[1:] == FREE_COMPLETED)
    released_by = FREE_COMPLETED if straight.any() else FREE_REQUESTED
    made, lost = np.flatnonzero(action == ALLOC), np.flatnonzero(first & (action == released_by))
    ends: Integers = np.full(len(rows), len(events))
    ends[:-1] = np.where(first[1:], len(events), rows[1:])  # the next event at this address
    made = made[np.argsort(rows[made])]
    kept = np.flatnonzero(~np.isin(blocks.address, address) & (blocks.state == history.ALLOCATED))
    survivors = np.where(ends[made] == len(events), _numbers(blocks, address[made]), NONE)
    pieces = Paired(
        address=np.concatenate((blocks.address[kept], address[lost], address[made])),
        requested_bytes=np.concatenate((blocks.requested_bytes[kept], size_bytes[lost], size_bytes[made])),
        start=np.concatenate((np.full(len(kept) + len(lost), NONE), rows[made])),
        end=np.concatenate((np.full(len(kept), len(events)), rows[lost], ends[made])),
        # A release has the releasing code's stack, unless the history was recorded otherwise.
        stack=np.concatenate((blocks.stack[kept], np.full(len(lost), NONE, dtype=np.int32), events.stack[rows[made]])),
        block=np.concatenate((kept, np.full(len(lost), NONE), survivors)),
    )
    # A completion without its request frees memory that did not count at the start.
    completed = first & (action == FREE_COMPLETED) & (released_by == FREE_REQUESTED)
    waiting = ~np.isin(blocks.address, address) & (blocks.state == history.AWAITING_FREE)
    return pieces, Awaited(
        address=np.concatenate((address[completed], blocks.address[waiting])),
        requested_bytes=np.concatenate((size_bytes[completed], blocks.requested_bytes[waiting])),
    )


def _numbers(blocks: history.Blocks, addresses: Integers) -> Integers:
    allocated = np.flatnonzero(blocks.state == history.ALLOCATED)
    allocated = allocated[np.argsort(blocks.address[allocated], kind="stable")]
    found = np.append(allocated, NONE)[np.searchsorted(blocks.address[allocated], addresses)]
    return np.where(np.append(blocks.address, NONE)[found] == addresses, found, NONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetimes(Pieces):
    block_bytes: Integers
    """Block sizes; those alive sum to the allocator's `allocated_bytes`."""
    num_events: int
    notes: tuple[str, ...] = field(default=())


def replay(device: DeviceHistory, settings: history.AllocatorSettings) -> Lifetimes:
    pieces, awaited = pair(device)
    rounded = rounded_sizes(pieces.requested_bytes, settings)
    notes = list[str]()
    if not _has_segments(device):
        blocks = pieces.requested_bytes
    elif _grows(device, settings):
        blocks = rounded
    else:
        blocks, notes = _divided(device, settings, pieces, awaited, rounded)
    blocks = np.where(pieces.block == NONE, blocks, np.append(device.blocks.size_bytes, NONE)[pieces.block])
    too_small = blocks < pieces.requested_bytes  # impossible in an allocator, but the file may be of another
    if too_small.any():
        blocks = np.where(too_small, rounded, blocks)
        notes.append(
            f"sizes: {counted(int(too_small.sum()), 'block')} would be smaller than requested; "
            "requested sizes, rounded up to 512 B, are used"
        )
    return Lifetimes(
        **{field.name: getattr(pieces, field.name) for field in fields(Pieces)},
        block_bytes=blocks,
        num_events=len(device.events),
        notes=tuple(notes),
    )


def reserved_peak_bytes(device: DeviceHistory) -> int | None:
    """Most bytes that the allocator reserved; None without segments."""
    if not _has_segments(device):
        return None
    events = device.events
    taken = (events.action == history.SEGMENT_ALLOC) | (events.action == history.SEGMENT_MAP)
    given = (events.action == history.SEGMENT_FREE) | (events.action == history.SEGMENT_UNMAP)
    change = np.where(taken, events.size_bytes, np.where(given, -events.size_bytes, 0))
    # Undoing the events from the known end gives the state before the first.
    later = np.cumsum(change[::-1])
    return int(device.segments.size_bytes.sum() - min(0, int(later.min(initial=0))))


def _has_segments(device: DeviceHistory) -> bool:
    """True for the history of a caching allocator, whose segments have typical sizes."""
    size_bytes = device.segments.size_bytes
    if len(size_bytes):
        return bool(((size_bytes >= SEGMENT_BYTES) & (size_bytes % SMALLEST_BYTES == 0)).all())
    action = device.events.action
    return bool(((action >= history.SEGMENT_ALLOC) & (action <= history.SEGMENT_UNMAP)).any())


def _grows(device: DeviceHistory, settings: history.AllocatorSettings) -> bool:
    """True if segments grow by pages; their blocks are always split."""
    mapped = device.segments.is_expandable.any() or (device.events.action == history.SEGMENT_MAP).any()
    return settings.expandable_segments or bool(mapped)


def _divided(
    device: DeviceHistory, settings: history.AllocatorSettings, pieces: Paired, awaited: Awaited, rounded: Integers
) -> tuple[Integers, list[str]]:
    sizes = rounded.copy()
    pool = LargePool(settings)
    unsure = _begin(pool, device, settings, pieces, awaited, sizes)
    events = device.events
    # Without completions, a block is reusable from its release request on.
    released_by = FREE_COMPLETED if np.any(events.action == FREE_COMPLETED) else FREE_REQUESTED
    large = rounded_sizes(events.size_bytes, settings) > SMALL_POOL_BYTES
    moves = np.isin(events.action, (history.SEGMENT_ALLOC, history.SEGMENT_FREE))
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
        elif action == history.SEGMENT_ALLOC:
            pool.add_segment(address, size)
        elif action == history.SEGMENT_FREE:
            pool.remove_segment(address)
        else:
            pool.release(address)
    for number, size in pool.corrected.items():
        sizes[number] = size
    return sizes, _notes(len(unsure - pool.corrected.keys()), unknown)


def _begin(
    pool: LargePool,
    device: DeviceHistory,
    settings: history.AllocatorSettings,
    pieces: Paired,
    awaited: Awaited,
    sizes: Integers,
) -> set[int]:
    """Divide the pool's segments as they were before the first event. Writes block sizes to `sizes`, and returns the
    numbers of allocations whose size is assumed.
    """
    unsure = set[int]()
    old = np.flatnonzero((pieces.start == NONE) & (sizes > SMALL_POOL_BYTES))
    addresses = np.concatenate((pieces.address[old], awaited.address))
    ends = addresses + np.concatenate((sizes[old], rounded_sizes(awaited.requested_bytes, settings)))
    exact = np.concatenate((pieces.block[old], np.full(len(awaited.address), NONE)))
    numbers = np.concatenate((old, np.full(len(awaited.address), NONE)))
    ends = np.where(exact != NONE, addresses + np.append(device.blocks.size_bytes, NONE)[exact], ends)
    order = np.argsort(addresses)
    addresses, ends, numbers, exact = addresses[order], ends[order], numbers[order], exact[order]
    for start, size in _segments_before(device).items():
        first, stop = np.searchsorted(addresses, (start, start + size))
        found = list[tuple[int, int, int]]()
        limits = [*addresses[first + 1 : stop].tolist(), start + size]
        for row, limit in zip(range(first, stop), limits, strict=stop > first):
            begin, end, number = int(addresses[row]), int(ends[row]), int(numbers[row])
            if exact[row] == NONE:
                # No block of the large pool is as small as this gap, so it belongs to the piece before.
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


def _segments_before(device: DeviceHistory) -> dict[int, int]:
    """Start and size of the segments before the first event: the last ones, with all events undone."""
    events, segments = device.events, device.segments
    held = dict(zip(segments.address.tolist(), segments.size_bytes.tolist(), strict=True))
    rows = np.flatnonzero(np.isin(events.action, (history.SEGMENT_ALLOC, history.SEGMENT_FREE)))[::-1]
    columns = (events.action[rows], events.address[rows], events.size_bytes[rows])
    for action, address, size in zip(*(column.tolist() for column in columns), strict=True):
        if action == history.SEGMENT_ALLOC:
            held.pop(address, None)
        else:
            held[address] = size
    return held


def _notes(unsure: int, unknown: int) -> list[str]:
    notes = []
    if unsure:
        notes.append(f"sizes: {counted(unsure, 'block')} from before the history may be up to 1 MiB larger")
    if unknown:
        notes.append(
            f"sizes: {counted(unknown, 'allocation')} began without a free block in the snapshot; "
            "requested sizes, rounded up to 512 B, are used"
        )
    return notes
