"""The memory of `sharded`: each weight has an owner, which has its averaged gradient and its optimizer state.

As steplab.parallel has it: owners are assigned bucket by bucket of gradients, the largest weight first, each to the
rank that has least (parallel.ownership). By collectives a bucket is a buffer with a slot for each owner
(parallel.owned_buckets), and so are parameters that are exchanged together (parallel.flat_parameters); slots are padded
to one length where that takes at most an eighth. By peer copies a rank has memory for its own averages, for gradients
of others that land there, and for all parameters, all of it outside of torch's allocator (parallel.peer_copies,
parallel.parameter_copies).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from steplab.plan.dry_run.sizes import rounded_up
from steplab.plan.layout.buckets import (
    ALIGNMENT_BYTES,
    BYTES_PER_MB,
    PEER_COUNTER_BYTES,
    PEER_PAGE,
    PEER_WINDOW_BYTES,
    Buckets,
    aligned,
    own_groups,
)
from steplab.plan.layout.weights import model_weights
from steplab.specs.model import TransformerShape

_SLOT_ALIGNMENT_BYTES = 256
_MOST_PADDING = 1 / 8
_LARGEST_PARTS = 3
"""Parts of a bucket for which there is room where gradients land."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """What rank 0 owns, and what its buffers take."""

    weights_bytes: int
    """Bytes of the weights that rank 0 updates."""
    num_weights: int
    """Number of the weights that rank 0 updates."""
    parameters_bytes: int
    """Bytes of the buffers in which all parameters lie."""
    by_peer_copies: bool
    """Whether parameters and averaged gradients lie outside of torch's allocator."""
    buckets: Buckets
    """Buckets of gradients."""


@functools.lru_cache(maxsize=256)
def owned_of(
    shape: TransformerShape, bucket_mb: float, element_bytes: int, ranks: int, *, by_peer_copies: bool
) -> Owned:
    """What `sharded` takes on each of so many ranks, with buckets of that size for gradients and for parameters."""
    weights = [weight.elements for weight in model_weights(shape)]
    backwards = list(reversed(range(len(weights))))
    sizes = [aligned(weights[index], element_bytes, ALIGNMENT_BYTES) for index in backwards]
    groups = [[backwards[place] for place in group] for group in own_groups(sizes, bucket_mb * BYTES_PER_MB)]
    owners = _owners(weights, groups, ranks)

    def shares(group: Sequence[int], alignment_bytes: int) -> list[int]:
        """Bytes of each owner's weights in a group."""
        found = [0] * ranks
        for index in group:
            found[owners[index]] += aligned(weights[index], element_bytes, alignment_bytes)
        return found

    runs = _runs([count * element_bytes for count in weights], bucket_mb * BYTES_PER_MB)
    parameters = [shares(run, _SLOT_ALIGNMENT_BYTES) for run in runs]
    mine = [index for index, owner in enumerate(owners) if owner == 0]
    if by_peer_copies:
        counters = 2 * ranks * PEER_COUNTER_BYTES
        parameters_bytes = sum(rounded_up(sum(run), PEER_PAGE) for run in parameters) + counters
        buckets = _landing([shares(group, ALIGNMENT_BYTES) for group in groups], ranks, counters)
    else:
        parameters_bytes = sum(map(_slots, parameters))
        buckets = _buffered([shares(group, _SLOT_ALIGNMENT_BYTES) for group in groups])
    return Owned(
        weights_bytes=sum(weights[index] for index in mine) * element_bytes,
        num_weights=len(mine),
        parameters_bytes=parameters_bytes,
        by_peer_copies=by_peer_copies,
        buckets=buckets,
    )


def _landing(parts: Sequence[Sequence[int]], ranks: int, counters_bytes: int) -> Buckets:
    """Buckets of peer copies, of which each rank keeps its part; its gradients wait until others have landed."""
    sizes = [sum(of_ranks) for of_ranks in parts]
    largest = [rounded_up(max(of_ranks), PEER_PAGE) for of_ranks in parts]
    window = min(sum(sizes), max(PEER_WINDOW_BYTES, _LARGEST_PARTS * max(sizes)))
    ring = max(rounded_up(math.ceil(window / ranks), PEER_PAGE), min(sum(largest), _LARGEST_PARTS * max(largest)))
    kept = max(sum(rounded_up(of_ranks[rank], PEER_PAGE) for of_ranks in parts) for rank in range(ranks))
    return Buckets(
        sizes_bytes=tuple(sizes),
        buffered_bytes=0,
        waiting_bytes=window,
        during_backward=True,
        copied_bytes=0,
        shared_bytes=kept + (ranks - 1) * ring + counters_bytes,
    )


def _buffered(shares: Sequence[Sequence[int]]) -> Buckets:
    """Buckets of collectives, into whose buffers all gradients are copied."""
    sizes = [_slots(of_ranks) for of_ranks in shares]
    return Buckets(
        sizes_bytes=tuple(sizes),
        buffered_bytes=sum(sizes),
        waiting_bytes=max(sizes),
        during_backward=True,
        copied_bytes=sum(map(sum, shares)),
    )


def _owners(weights: Sequence[int], groups: Sequence[Sequence[int]], ranks: int) -> list[int]:
    owners, loads = [0] * len(weights), [0] * ranks
    for group in groups:
        for _, _, index in sorted((-weights[index], place, index) for place, index in enumerate(group)):
            _, owner = min(zip(loads, range(ranks), strict=True))
            owners[index] = owner
            loads[owner] += weights[index]
    return owners


def _runs(sizes_bytes: Sequence[int], bucket_bytes: float) -> list[range]:
    """Neighbours whose parameters are exchanged together; a run ends once it has `bucket_bytes`."""
    borders, filled = [0], 0
    for index, size in enumerate(sizes_bytes):
        if filled >= bucket_bytes:
            borders.append(index)
            filled = 0
        filled += size
    return [range(*both) for both in pairwise([*borders, len(sizes_bytes)])]


def _slots(shares: Sequence[int]) -> int:
    """Bytes of a buffer with a slot for each owner."""
    padded = len(shares) * max(shares)
    return padded if padded <= (1 + _MOST_PADDING) * sum(shares) else sum(shares)
