"""Counts the memory of `sharded` data parallelism: only a weight's owner has its averaged gradient and its optimizer
state.

Owners are assigned by gradient bucket (parallel.sizes). With collectives, a bucket of gradients or parameters is a
buffer with a slot for each owner. With peer copies, a rank has memory outside torch's allocator for its averages, the
gradients that others copy there, and all parameters (parallel.flat_parameters).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from steplab.parallel.sizes import divided, grouped, owner_slots, owners_in, pages, runs_of, shares_of, worth_padding
from steplab.plan.layout.buckets import Buckets, buckets_of_peers, with_counters
from steplab.specs.ddp import BYTES_PER_MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    weights_bytes: int
    num_weights: int
    parameters_bytes: int
    buckets: Buckets


@functools.lru_cache(maxsize=256)
def owned_of(
    elements: tuple[int, ...], bucket_mb: float, element_bytes: int, ranks: int, *, by_peer_copies: bool
) -> Owned:
    """Rank 0's memory under `sharded`, with buckets of `bucket_mb` for gradients and for parameters.

    elements: elements of each weight, in the order of the model.
    """
    sizes, limit = [count * element_bytes for count in elements], bucket_mb * BYTES_PER_MB
    groups = [[len(sizes) - 1 - place for place in group] for group in grouped(sizes[::-1], limit)]
    owners_of_groups = owners_in([[elements[index] for index in group] for group in groups], ranks)
    owner = {
        index: rank
        for group, ranks_of_group in zip(groups, owners_of_groups, strict=True)
        for index, rank in zip(group, ranks_of_group, strict=True)
    }

    def slots_bytes(members: Sequence[int], *, pads: bool) -> int:
        given = [elements[index] for index in members], element_bytes, [owner[index] for index in members], ranks
        even = pads and worth_padding(shares_of(*given), "cuda")
        return owner_slots(*given, even=even).size * element_bytes

    runs = runs_of(sizes, limit)
    if by_peer_copies:
        parameters_bytes = with_counters(sum(pages(slots_bytes(run, pads=False)) for run in runs), ranks)
        divisions = [
            divided([sizes[index] for index in group], ranks, those)
            for group, those in zip(groups, owners_of_groups, strict=True)
        ]
        buckets = buckets_of_peers(divisions, ranks)
    else:
        parameters_bytes = sum(slots_bytes(run, pads=True) for run in runs)
        buffers = [slots_bytes(group, pads=True) for group in groups]
        buckets = Buckets(
            sizes_bytes=tuple(buffers),
            buffered_bytes=sum(buffers),
            waiting_bytes=max(buffers),
            during_backward=True,
            copied_bytes=sum(slots_bytes(group, pads=False) for group in groups),
        )
    mine = [index for index, rank in owner.items() if rank == 0]
    return Owned(
        weights_bytes=sum(sizes[index] for index in mine),
        num_weights=len(mine),
        parameters_bytes=parameters_bytes,
        buckets=buckets,
    )
