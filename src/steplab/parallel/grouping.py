"""Which gradients are sent together, by their sizes alone; the same on every rank because its inputs are.

In a buffer each gradient begins at a multiple of 16 bytes, so that vectorised optimizers can read it; the gaps are zero
and are sent too.
"""

from collections.abc import Hashable, Sequence

ALIGNMENT_BYTES = 16
MOST_OF_THE_REST, LEAST_OF_THE_LIMIT = 1 / 2, 1 / 8
"""The share of all gradients from its first one on that a bucket may take, and the share of the given size that it may
take in any case."""


def grouped(
    sizes_bytes: Sequence[int], bucket_bytes: float, kinds: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Groups of gradients by index, of gradients of these sizes in order of readiness; each is in one group.

    The gradients of a group are of one kind, if `kinds` are given; groups are in the order in which they become
    complete. A group of several has at most `bucket_bytes`, and less towards the end of the backward pass, so that the
    size does not decide how much is sent after it: where sending takes up to half as long as the pass, a bucket of half
    of the rest has been sent before the next one is complete.
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
    """The bytes that a gradient of so many takes in a buffer, with the gap behind it."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
