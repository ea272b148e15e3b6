"""How a bucket of peer copies is divided: into chunks that travel one after the other, and each among the ranks.

Without owners each rank has an equal part of a chunk, whose borders may lie inside gradients, and all ranks get all
means. With owners a bucket is one chunk, the gradients lie in the order of their owners, each rank's part is what it
owns, and the means stay there.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn

from steplab.parallel.buckets import aligned
from steplab.parallel.ownership import Owners

PAGE = 256
"""Buckets, equal parts of them and landing places begin at multiples of so many bytes."""
PART_BYTES = 40 * 2**20
"""The most that a rank has of a chunk, in whole pages. Found by measurement (docs/ddp.md): on two H200s a backward
pass was slowed more beside parts of 10 and 20 MiB, and by buckets that were not divided."""


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

    parameters: Sequence[nn.Parameter]
    """The parameters of the bucket's gradients."""
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
            parameter = self.parameters[index]
            size = parameter.element_size()
            first, last = max(start, begin), min(start + parameter.numel() * size, end)
            if first < last:
                found.append(Overlap(index, first - start, first - begin, last - first))
            start += aligned(parameter) * size
        return found


def divided(parameters: Sequence[nn.Parameter], size: int, owners: Owners | None) -> Division:
    """The division of the bucket of these parameters among `size` ranks; by owner if `owners` are given."""
    sizes = [aligned(parameter) * parameter.element_size() for parameter in parameters]
    if owners is None:
        total, chunks = sum(sizes), []
        for begin in range(0, max(total, 1), size * PART_BYTES):
            part = min(pages(-(-(total - begin) // size)), PART_BYTES)
            chunks.append([min(begin + rank * part, total) for rank in range(size + 1)])
        return Division(parameters, range(len(sizes)), chunks, None)
    those = [owners[parameter] for parameter in parameters]
    parts = [0] * size
    for owner, num_bytes in zip(those, sizes, strict=True):
        parts[owner] += num_bytes
    order = sorted(range(len(sizes)), key=lambda index: (those[index], index))
    return Division(parameters, order, [[0, *accumulate(parts)]], those)


def largest_part_bytes(borders: Sequence[int]) -> int:
    """The length of the largest part between these borders, in whole pages."""
    return pages(max(end - begin for begin, end in pairwise(borders)))


def pages(num_bytes: int) -> int:
    """The size rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE
