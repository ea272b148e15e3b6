"""The sizes of the blocks that CUDA's caching allocator sets aside for the requested sizes.

Sizes are rounded up to 512 B. A block of the small pool, or of a segment that grows, is cut to that size. In the large
pool the rest of a free block is cut off only if it is more than 1 MiB: otherwise the piece gets it as well, and its
size depends on how the segment was divided at that moment. So the blocks of the large pool are followed from event to
event: the history says where each piece begins, which is always where a free block begins (CUDACachingAllocator.cpp:
`round_size`, `should_split`, `alloc_found_block`, `free_block`, `try_merge_blocks`).
"""

from collections.abc import Iterable

import numpy as np

from steplab.reading.snapshots.history import AllocatorSettings, Integers
from steplab.units import KIB, MIB

SMALLEST_BYTES = KIB // 2
"""Every size is a multiple of this."""
SMALL_POOL_BYTES = MIB
"""Sizes up to this, after rounding, come from the small pool; in the large pool, a rest up to this size is not cut
off."""
SEGMENT_BYTES = 2 * MIB
"""The smallest segment."""
OVERSIZE_BYTES = 20 * MIB
"""How much larger than the request a block may be that is never split."""


def rounded_sizes(requested_bytes: Integers, settings: AllocatorSettings) -> Integers:
    """The sizes to which the allocator rounds requests before it looks for a block."""
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
    """The division of large segments into blocks, followed through the events."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self._most_split = settings.max_split_bytes
        self._free: dict[int, int] = {}
        """The end of each free block, by its start."""
        self._free_before: dict[int, int] = {}
        """The start of each free block, by its end."""
        self._used: dict[int, tuple[int, int]] = {}
        """The end of each block in use and the number of its piece, by its start."""
        self._borders: set[int] = set()
        """The starts of segments, across which blocks do not merge."""
        self.corrected: dict[int, int] = {}
        """The corrected size of a piece's block, by the piece's number."""
        self._searches_left = 10_000

    def add_segment(self, start: int, size_bytes: int) -> None:
        """Add a segment that is entirely free."""
        self._borders.add(start)
        self._set_free(start, start + size_bytes)

    def remove_segment(self, start: int) -> None:
        """Return a free segment to the device."""
        if start in self._free:
            self._take_free(start)
        self._borders.discard(start)

    def divide(self, start: int, size_bytes: int, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Divide a segment as it was found: (start, end, number) of the pieces in it, by address; the rest is free."""
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
        """The size of the block that a piece gets; None if the division of the memory there is unknown."""
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
        """Free a block, and merge it with the free blocks beside it."""
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
        """Let a free block begin at `start`, which it must: the piece before it is then larger or smaller than
        assumed."""
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
        """Set a piece to begin .. border, and border .. end to free."""
        self._used[begin] = (border, number)
        self.corrected[number] = border - begin
        self._set_free(border, end)

    def _set_free(self, start: int, end: int) -> None:
        if start in self._free:  # segments overlap, which those of an allocator never do
            self._take_free(start)
        if end in self._free_before:
            self._take_free(self._free_before[end])
        self._free[start] = end
        self._free_before[end] = start

    def _take_free(self, start: int) -> int:
        end = self._free.pop(start)
        del self._free_before[end]
        return end
