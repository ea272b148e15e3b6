"""How a bucket of peer copies is divided, into chunks that travel one after the other, and each among the ranks; and
where the buckets of a module lie in the memory that ranks share. All of it follows from sizes in bytes.

Without owners each rank has an equal part of a chunk, whose borders may lie inside gradients, and all ranks get all
means. With owners a bucket is one chunk, the gradients lie in the order of their owners, each rank's part is what it
owns, and the means stay there.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from steplab.parallel.grouping import aligned_bytes

PAGE = 256
"""Buckets, equal parts of them and landing places begin at multiples of so many bytes."""
PART_BYTES = 40 * 2**20
"""The most that a rank has of a chunk, in whole pages. Found by measurement (docs/ddp.md): on two H200s a backward
pass was slowed more beside parts of 10 and 20 MiB, and by buckets that were not divided."""
WINDOW_BYTES = 512_000_000
"""Gradients that are held, and have landing places, at a time: some blocks of a large model, so that a backward pass
whose gradients come in bursts need not wait. At least three of the largest bucket: one on its way out, one whose means
are made, and one on its way home."""
NUM_COUNTERS, COUNTER_BYTES = 2, 64
"""Counters that a rank has of each rank, behind what else it shares; each has its own cache line."""


class Overlap(NamedTuple):
    """Where a rank's part of a chunk and a gradient overlap, in bytes."""

    gradient: int
    """The gradient's number in the bucket."""
    in_gradient: int
    """The beginning of the overlap in the gradient."""
    in_part: int
    """The beginning of the overlap in the part."""
    num_bytes: int
    """The length of the overlap."""


class Division(NamedTuple):
    """The division of a bucket; the same on all ranks."""

    sizes_bytes: Sequence[int]
    """Bytes of each of the bucket's gradients."""
    order: Sequence[int]
    """Numbers of the gradients in the order in which they lie in the bucket."""
    chunks: Sequence[Sequence[int]]
    """The borders of each chunk's parts, in bytes from the beginning of the bucket: where the part of each rank begins,
    and where the last one ends."""
    owners: Sequence[int] | None
    """The rank that keeps the mean of each gradient; None if all ranks get all means."""

    @property
    def num_bytes(self) -> int:
        """The length of the bucket."""
        return self.chunks[-1][-1]

    @property
    def landing_bytes(self) -> int:
        """The largest part of each chunk, in whole pages: what a bucket takes of each ring of landing places."""
        return sum(map(largest_part_bytes, self.chunks))

    def kept_bytes(self, rank: int) -> int:
        """The length of what a rank keeps of the bucket: its own means, or all of them."""
        if self.owners is None:
            return self.num_bytes
        (borders,) = self.chunks
        return borders[rank + 1] - borders[rank]

    def overlaps(self, chunk: int, rank: int) -> list[Overlap]:
        """The overlaps of the gradients with a rank's part of a chunk."""
        begin, end = self.chunks[chunk][rank : rank + 2]
        found, start = [], 0
        for index in self.order:
            size = self.sizes_bytes[index]
            first, last = max(start, begin), min(start + size, end)
            if first < last:
                found.append(Overlap(index, first - start, first - begin, last - first))
            start += aligned_bytes(size)
        return found


def divided(sizes_bytes: Sequence[int], size: int, owners: Sequence[int] | None) -> Division:
    """The division of the bucket of gradients of these sizes among `size` ranks; by owner if `owners` are given."""
    sizes = [aligned_bytes(num_bytes) for num_bytes in sizes_bytes]
    if owners is None:
        total, chunks = sum(sizes), []
        for begin in range(0, max(total, 1), size * PART_BYTES):
            part = min(pages(-(-(total - begin) // size)), PART_BYTES)
            chunks.append([min(begin + rank * part, total) for rank in range(size + 1)])
        return Division(sizes_bytes, range(len(sizes)), chunks, None)
    parts = [0] * size
    for owner, num_bytes in zip(owners, sizes, strict=True):
        parts[owner] += num_bytes
    order = sorted(range(len(sizes)), key=lambda index: (owners[index], index))
    return Division(sizes_bytes, order, [[0, *accumulate(parts)]], owners)


class Places(NamedTuple):
    """Where the buckets of a module lie in the memory that ranks share; the same on all ranks."""

    starts: Sequence[Sequence[int]]
    """For each rank, the bytes from the beginning of its memory to what it keeps of each bucket."""
    rings_start: int
    """Bytes before the rings, in which gradients of the other ranks land."""
    ring_bytes: int
    """Bytes of each ring."""
    num_bytes: int
    """Bytes of buckets and rings together."""


def placed(divisions: Sequence[Division], size: int) -> Places:
    """The places of the buckets with these divisions among `size` ranks.

    A ring is a rank's part of the window. Where parts are uneven, it has room for three of the largest as well.
    """
    starts = [[0, *accumulate(pages(division.kept_bytes(rank)) for division in divisions)] for rank in range(size)]
    rings_start = max(ends[-1] for ends in starts)
    ring_bytes = pages(-(-window_bytes([division.num_bytes for division in divisions]) // size))
    if divisions[0].owners is not None:
        landings = [division.landing_bytes for division in divisions]
        ring_bytes = max(ring_bytes, min(sum(landings), 3 * max(landings)))
    return Places(starts, rings_start, ring_bytes, rings_start + (size - 1) * ring_bytes)


def window_bytes(sizes_bytes: Sequence[int]) -> int:
    """Bytes of gradients that are held at a time, of buckets of these sizes."""
    return min(sum(sizes_bytes), max(WINDOW_BYTES, 3 * max(sizes_bytes)))


def largest_part_bytes(borders: Sequence[int]) -> int:
    """The length of the largest part between these borders, in whole pages."""
    return pages(max(end - begin for begin, end in pairwise(borders)))


def pages(num_bytes: int) -> int:
    """The size rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE
