"""How a bucket of peer copies is divided among ranks: which part of which gradient each makes the mean of.

Without owners each rank has an equal part, whose borders may lie inside gradients, and all ranks get all means. With
owners the gradients lie in the order of their owners, each rank's part is what it owns, and the means stay there.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from steplab.parallel.buckets import aligned
from steplab.parallel.ownership import Owners

PAGE = 256
"""Buckets, equal parts of them and landing places begin at multiples of so many bytes."""


class Overlap(NamedTuple):
    """Where a rank's part of a bucket and a gradient overlap, in bytes."""

    gradient: int
    """The gradient's number in the bucket."""
    in_gradient: int
    """The beginning of the overlap in the gradient."""
    in_part: int
    """The beginning of the overlap in the part."""
    num_bytes: int
    """The length of the overlap."""


class Division(NamedTuple):
    """The division of a bucket among ranks; the same on all of them."""

    parameters: Sequence[nn.Parameter]
    """The parameters of the bucket's gradients."""
    order: Sequence[int]
    """Numbers of the gradients in the order in which they lie in the bucket."""
    borders: Sequence[int]
    """The beginning of each rank's part, and the end of the last one, in bytes."""
    owners: Sequence[int] | None
    """The rank that keeps the mean of each gradient; None if all ranks get all means."""

    def part_bytes(self, rank: int) -> int:
        """The length of a rank's part."""
        return self.borders[rank + 1] - self.borders[rank]

    def kept_bytes(self, rank: int) -> int:
        """The length of what a rank keeps of the bucket: its own means, or all of them."""
        return self.borders[-1] if self.owners is None else self.part_bytes(rank)

    @property
    def landing_bytes(self) -> int:
        """The length of the largest part, in whole pages: what a bucket takes of each ring of landing places."""
        return pages(max(map(self.part_bytes, range(len(self.borders) - 1))))

    def overlaps(self, rank: int) -> list[Overlap]:
        """The overlaps of the gradients with a rank's part."""
        begin, end = self.borders[rank], self.borders[rank + 1]
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
        part, total = pages(-(-sum(sizes) // size)), sum(sizes)
        return Division(parameters, range(len(sizes)), [min(rank * part, total) for rank in range(size + 1)], None)
    those = [owners[parameter] for parameter in parameters]
    parts = [0] * size
    for owner, num_bytes in zip(those, sizes, strict=True):
        parts[owner] += num_bytes
    order = sorted(range(len(sizes)), key=lambda index: (those[index], index))
    return Division(parameters, order, [0, *accumulate(parts)], those)


def pages(num_bytes: int) -> int:
    """The size rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE
