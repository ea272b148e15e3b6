"""Groups the gradients of data-parallel ranks into buckets, and counts their memory.

steplab's buckets follow parallel.sizes: a gradient alone in its bucket is sent from its own memory, others from a
buffer. torch's DDP (torch/csrc/distributed/c10d/reducer.cpp) copies all into buffers, and closes the first at 1 MiB,
others at the bucket size.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from steplab.parallel import sizes as parallel_sizes
from steplab.specs.ddp import BYTES_PER_MB

_DDP_FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    sizes_bytes: tuple[int, ...]
    buffered_bytes: int = 0
    """Bytes of the buckets' buffers in torch's allocator."""
    waiting_bytes: int = 0
    """Peak bytes of gradients whose bucket is not yet complete."""
    during_backward: bool
    copied_bytes: int = 0
    """Bytes of gradients that are copied into buffers in a step."""
    shared_bytes: int = 0
    """Memory outside torch's allocator for peer copies."""


@functools.lru_cache(maxsize=256)
def buckets_of(
    elements: tuple[int, ...], kind: str, bucket_mb: float, element_bytes: int, *, peers: int = 0
) -> Buckets:
    """Gradient buckets and their memory in a kind of data parallelism (specs.ddp.Kind), except `sharded` (owned.py).

    Args:
        elements: elements of each weight that has a gradient, in the order of the model.
        peers: number of ranks that copy into each other's memory; 0: they use collectives.
    """
    sizes = [count * element_bytes for count in reversed(elements)]
    if kind == "torch_ddp":
        of_groups = [sum(group) for group in _ddp_groups(sizes, bucket_mb * BYTES_PER_MB)]
        total = sum(of_groups)
        return Buckets(sizes_bytes=tuple(of_groups), buffered_bytes=total, during_backward=True, copied_bytes=total)
    limit = {"flat": float("inf"), "bucketed": bucket_mb * BYTES_PER_MB}
    indices = parallel_sizes.grouped(sizes, limit.get(kind, 0.0)) if kind != "none" else []
    groups = [[sizes[index] for index in group] for group in indices]
    if peers:
        return buckets_of_peers([parallel_sizes.divided(group, peers, None) for group in groups], peers)
    of_groups = [sum(map(parallel_sizes.aligned_bytes, group)) for group in groups]
    buffered = [size for size, group in zip(of_groups, groups, strict=True) if len(group) > 1]
    return Buckets(
        sizes_bytes=tuple(of_groups),
        buffered_bytes=sum(buffered),
        waiting_bytes=max(buffered, default=0),
        during_backward=kind in ("overlap", "bucketed"),
        copied_bytes=sum(buffered),
    )


def buckets_of_peers(divisions: Sequence[parallel_sizes.Division], ranks: int) -> Buckets:
    """Buckets sent by peer copies from the gradients' own memory; at most parallel.sizes.window_bytes wait."""
    sizes = [division.num_bytes for division in divisions]
    return Buckets(
        sizes_bytes=tuple(sizes),
        waiting_bytes=parallel_sizes.window_bytes(sizes),
        during_backward=True,
        shared_bytes=with_counters(parallel_sizes.placed(divisions, ranks).num_bytes, ranks),
    )


def with_counters(num_bytes: int, ranks: int) -> int:
    return num_bytes + parallel_sizes.NUM_COUNTERS * ranks * parallel_sizes.COUNTER_BYTES


def _ddp_groups(sizes: Sequence[int], limit: float) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for size in sizes:
        groups[-1].append(size)
        if sum(groups[-1]) >= (_DDP_FIRST_BUCKET_BYTES if len(groups) == 1 else limit):
            groups.append([])
    return [group for group in groups if group]
