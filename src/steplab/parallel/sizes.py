"""Grouping and placing of tensors by size, without torch; equal inputs give equal results on all ranks.

- `grouped`: gradients sent together. Each begins at a multiple of 16 bytes, for vectorised optimizers.
- `owners_in`: each parameter's owner. Parameters stay whole: Muon and Adafactor depend on their shape.
- `owner_slots`: places in a buffer with a slot per owner. One collective needs equal slots; on GPUs it is worth a
  padding of an eighth, on CPUs none, because gloo needs its own memory.
- `divided`, `placed`: chunks of a bucket of peer copies, their parts by rank, and places in shared memory.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

ALIGNMENT_BYTES = 16
MOST_OF_THE_REST, LEAST_OF_THE_LIMIT = 1 / 2, 1 / 8
"""A bucket's limit: at most the first share of the gradients still to come, at least the second of `bucket_bytes`."""


def grouped(
    sizes_bytes: Sequence[int], bucket_bytes: float, kinds: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Group indices of gradients, given by size in order of readiness. A group has one kind; groups are in order of
    completion.

    A group of several has at most `bucket_bytes`, and less towards the end of the backward pass, to send little after
    it. If sending takes up to half as long as computing gradients, half of what remains is sent before the next bucket
    is complete.
    """
    sizes = [aligned_bytes(size) for size in sizes_bytes]
    rest = sum(sizes)
    closed: list[list[int]] = []
    open_groups: dict[Hashable, list[int]] = {}
    room: dict[Hashable, float] = {}
    for index, (kind, size) in enumerate(zip(kinds or [None] * len(sizes), sizes, strict=True)):
        if kind in open_groups and size > room[kind]:
            closed.append(open_groups.pop(kind))
        if kind not in open_groups:
            open_groups[kind] = []
            room[kind] = min(bucket_bytes, max(rest * MOST_OF_THE_REST, bucket_bytes * LEAST_OF_THE_LIMIT))
        open_groups[kind].append(index)
        room[kind] -= size
        rest -= size
    return sorted([*closed, *open_groups.values()], key=lambda group: group[-1])


def aligned_bytes(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def owners_of(elements: Sequence[int], loads: list[int]) -> list[int]:
    """Owner of each parameter: the largest parameters first, each to the rank with the fewest elements. `loads`,
    elements per rank, is updated. Ties go to the earlier parameter and lower rank.
    """
    owners = [0] * len(elements)
    for index in sorted(range(len(elements)), key=lambda index: (-elements[index], index)):
        owner = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += elements[index]
    return owners


def owners_in(groups: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Owners of each group's parameters, given by numbers of elements; each group and the total are spread evenly."""
    loads = [0] * size
    return [owners_of(elements, loads) for elements in groups]


def runs_of(sizes_bytes: Sequence[int], bucket_bytes: float) -> list[list[int]]:
    """Split indices into consecutive runs; a run ends once it has `bucket_bytes`."""
    found: list[list[int]] = []
    filled: float = bucket_bytes
    for index, size_bytes in enumerate(sizes_bytes):
        if filled >= bucket_bytes:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += size_bytes
    return found


SLOT_ALIGNMENT_BYTES = 256
"""Least alignment of torch's allocators, which kernels rely on."""
MOST_PADDING = 1 / 8


@dataclass(frozen=True, slots=True)
class OwnerSlots:
    bounds: list[tuple[int, int]]
    starts: list[int]

    @property
    def size(self) -> int:
        return self.bounds[-1][1]


def owner_slots(
    elements: Sequence[int], element_bytes: int, owners: Sequence[int], size: int, *, even: bool
) -> OwnerSlots:
    """Place tensors of one dtype in a buffer with a slot per owner, ranks below `size`. `even`: equal slots."""
    shares = shares_of(elements, element_bytes, owners, size)
    ends = list(accumulate([max(shares)] * size if even else shares))
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    free, starts = [begin for begin, _ in bounds], []
    for count, owner in zip(elements, owners, strict=True):
        starts.append(free[owner])
        free[owner] += _aligned(count, element_bytes)
    return OwnerSlots(bounds, starts)


def shares_of(elements: Sequence[int], element_bytes: int, owners: Sequence[int], size: int) -> list[int]:
    shares = [0] * size
    for count, owner in zip(elements, owners, strict=True):
        shares[owner] += _aligned(count, element_bytes)
    return shares


def worth_padding(shares: Sequence[int], device_type: str) -> bool:
    """True if one collective on padded slots is estimated to be faster than one collective per owner."""
    return device_type != "cpu" and len(shares) * max(shares) <= (1 + MOST_PADDING) * sum(shares)


def _aligned(num_elements: int, element_bytes: int) -> int:
    grain = max(1, SLOT_ALIGNMENT_BYTES // element_bytes)
    return -(-num_elements // grain) * grain


PAGE = 256
"""Alignment in bytes of buckets, their parts, and landing areas for received gradients."""
PART_BYTES = 40 * 2**20
"""Largest part of a rank in a chunk, in bytes. On two H200s, 10 MiB, 20 MiB and undivided buckets slowed backward more
(docs/ddp.md).
"""
WINDOW_BYTES = 512_000_000
"""Bytes of gradients that can be in transit at once, so that bursts need not wait. At least three of the largest bucket
fit: being sent, averaged, and returned.
"""
NUM_COUNTERS, COUNTER_BYTES = 2, 64
"""Number of counters per pair of ranks, and their distance: each has its own cache line."""


class Overlap(NamedTuple):
    gradient: int
    in_gradient: int
    in_part: int
    num_bytes: int


class Division(NamedTuple):
    sizes_bytes: Sequence[int]
    order: Sequence[int]
    chunks: Sequence[Sequence[int]]
    """Boundaries of the ranks' parts in each chunk, in bytes from the bucket's beginning."""
    owners: Sequence[int] | None
    """Rank that keeps each gradient's average; None: all ranks get all averages."""

    @property
    def num_bytes(self) -> int:
        return self.chunks[-1][-1]

    @property
    def landing_bytes(self) -> int:
        """Bytes that the bucket needs in each ring, the buffer for one peer's gradients."""
        return sum(map(largest_part_bytes, self.chunks))

    def kept_bytes(self, rank: int) -> int:
        if self.owners is None:
            return self.num_bytes
        (borders,) = self.chunks
        return borders[rank + 1] - borders[rank]

    def overlaps(self, chunk: int, rank: int) -> list[Overlap]:
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
    starts: Sequence[Sequence[int]]
    """For each rank, offsets of its kept part of each bucket, in bytes."""
    rings_start: int
    ring_bytes: int
    num_bytes: int


def placed(divisions: Sequence[Division], size: int) -> Places:
    """Place all buckets, and the rings for received gradients. A ring has a rank's share of WINDOW_BYTES. With owners
    it has room for at least three of the largest parts, which are uneven.
    """
    starts = [[0, *accumulate(pages(division.kept_bytes(rank)) for division in divisions)] for rank in range(size)]
    rings_start = max(ends[-1] for ends in starts)
    ring_bytes = pages(-(-window_bytes([division.num_bytes for division in divisions]) // size))
    if divisions[0].owners is not None:
        landings = [division.landing_bytes for division in divisions]
        ring_bytes = max(ring_bytes, min(sum(landings), 3 * max(landings)))
    return Places(starts, rings_start, ring_bytes, rings_start + (size - 1) * ring_bytes)


def window_bytes(sizes_bytes: Sequence[int]) -> int:
    return min(sum(sizes_bytes), max(WINDOW_BYTES, 3 * max(sizes_bytes)))


def largest_part_bytes(borders: Sequence[int]) -> int:
    return pages(max(end - begin for begin, end in pairwise(borders)))


def pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
