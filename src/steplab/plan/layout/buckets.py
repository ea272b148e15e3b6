"""Gradients of data-parallel ranks in buckets: which travel together, and what memory the buckets take.

steplab's own (parallel.buckets, parallel.collective_buckets): gradients in the order in which the backward pass gives
them; a bucket takes no further one when it would grow past its size, or past half of what was left when it began and
an eighth of its size. A gradient alone in its bucket travels in the memory where it was born; others are copied into
the bucket's buffer, which stays. torch's DDP (torch/csrc/distributed/c10d/reducer.cpp): the first bucket closes once it
has 1 MiB, each other once it has its size, and all are buffers.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from steplab.plan.dry_run.sizes import rounded_up
from steplab.plan.layout.weights import model_weights
from steplab.specs.model import TransformerShape

BYTES_PER_MB = 1e6
ALIGNMENT_BYTES = 16
_DDP_FIRST_BUCKET_BYTES = 2**20
PEER_WINDOW_BYTES, PEER_PAGE, PEER_COUNTER_BYTES = 512_000_000, 256, 64
"""As parallel.peer_copies and parallel.symmetric_memory have them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The buckets of a step."""

    sizes_bytes: tuple[int, ...]
    """Size of each message, in the order of launch."""
    buffered_bytes: int
    """Size of the buffers, which are there all the time."""
    waiting_bytes: int
    """Most bytes of gradients that wait for the others of their bucket."""
    during_backward: bool
    """Whether buckets travel beside the backward pass."""
    copied_bytes: int
    """Size of the gradients that are copied into a buffer."""
    shared_bytes: int = 0
    """Size of buffers and landing places of peer copies, which are not torch's allocator's; 0: there are none."""


@functools.lru_cache(maxsize=256)
def buckets_of(shape: TransformerShape, kind: str, bucket_mb: float, element_bytes: int, *, peers: int = 0) -> Buckets:
    """The buckets of a kind of data parallelism (specs.ddp.Kind) but sharded, which is owned.py's; none: without
    communication. peers: ranks that copy into each other's memory; 0: collectives."""
    elements = [weight.elements for weight in reversed(model_weights(shape))]
    if kind == "torch_ddp":
        groups = _ddp_groups([count * element_bytes for count in elements], bucket_mb * BYTES_PER_MB)
        sizes = [sum(elements[index] * element_bytes for index in group) for group in groups]
        total = sum(sizes)
        return Buckets(
            sizes_bytes=tuple(sizes), buffered_bytes=total, waiting_bytes=0, during_backward=True, copied_bytes=total
        )
    limit = {"flat": float("inf"), "bucketed": bucket_mb * BYTES_PER_MB}
    sizes = [aligned(count, element_bytes, ALIGNMENT_BYTES) for count in elements]
    groups = own_groups(sizes, limit.get(kind, 0.0)) if kind != "none" else []
    of_groups = [sum(sizes[index] for index in group) for group in groups]
    if peers:
        window = min(sum(of_groups), max(PEER_WINDOW_BYTES, 3 * max(of_groups)))
        ring = rounded_up(math.ceil(window / peers), PEER_PAGE)
        pages = sum(rounded_up(size, PEER_PAGE) for size in of_groups)
        return Buckets(
            sizes_bytes=tuple(of_groups),
            buffered_bytes=0,
            waiting_bytes=window,
            during_backward=True,
            copied_bytes=0,
            shared_bytes=pages + (peers - 1) * ring + 2 * peers * PEER_COUNTER_BYTES,
        )
    buffered = [size for size, group in zip(of_groups, groups, strict=True) if len(group) > 1]
    return Buckets(
        sizes_bytes=tuple(of_groups),
        buffered_bytes=sum(buffered),
        waiting_bytes=max(buffered, default=0),
        during_backward=kind in ("overlap", "bucketed"),
        copied_bytes=sum(buffered),
    )


def own_groups(sizes: Sequence[int], limit: float) -> list[list[int]]:
    """The gradients of each of steplab's own buckets, by index."""
    groups: list[list[int]] = []
    rest, room = sum(sizes), 0.0
    for index, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = min(limit, max(rest / 2, limit / 8))
        groups[-1].append(index)
        room -= size
        rest -= size
    return groups


def _ddp_groups(sizes: Sequence[int], limit: float) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        groups[-1].append(index)
        filled += size
        if filled >= (_DDP_FIRST_BUCKET_BYTES if len(groups) == 1 else limit):
            groups.append([])
            filled = 0
    return [group for group in groups if group]


def aligned(elements: int, element_bytes: int, alignment_bytes: int) -> int:
    """Bytes of so many elements in a buffer, where each tensor begins at a multiple of `alignment_bytes`."""
    return rounded_up(elements, max(alignment_bytes // element_bytes, 1)) * element_bytes
