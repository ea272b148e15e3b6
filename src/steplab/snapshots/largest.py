"""The largest allocations, those alike together."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from steplab.records.memory_profile import Allocation
from steplab.snapshots.history import Codes, Flags, Integers
from steplab.snapshots.made import Origin, Origins, without_numbers
from steplab.snapshots.replay import Lifetimes

_MOST_AT_PEAK, _MOST_OTHERS = 25, 10
_MOST_KINDS = 50_000
"""Of the same size, stack and module; a step has hundreds."""


def largest(
    lifetimes: Lifetimes, codes: Codes, names: Sequence[str], origins: Origins, peak_moment: int
) -> tuple[Allocation, ...]:
    """Groups of allocations alike: first those alive at the peak, then others, each by their bytes together."""
    alive = alive_at(lifetimes, peak_moment)
    at_peak = _groups(np.flatnonzero(alive), lifetimes, codes, names, origins, at_peak=True)
    others = _groups(np.flatnonzero(~alive), lifetimes, codes, names, origins, at_peak=False)
    return (*at_peak[:_MOST_AT_PEAK], *others[:_MOST_OTHERS])


def alive_at(lifetimes: Lifetimes, moment: int) -> Flags:
    """Which lifetimes hold memory at a moment."""
    alive: Flags = (lifetimes.start < moment) & (lifetimes.end >= moment)
    return alive


def _groups(
    pieces: Integers, lifetimes: Lifetimes, codes: Codes, names: Sequence[str], origins: Origins, *, at_peak: bool
) -> list[Allocation]:
    counts = Counter[tuple[int, int, int, Origin]]()
    modules = defaultdict[tuple[int, int, int, Origin], set[str | None]](set)
    for piece, count in _kinds(pieces, lifetimes, codes, origins):
        origin = origins.of(piece)
        alike = replace(origin, module=without_numbers(origin.module)) if origin.module else origin
        requested, block = int(lifetimes.requested_bytes[piece]), int(lifetimes.block_bytes[piece])
        group = (requested, block, int(codes[piece]), alike)
        counts[group] += count
        modules[group].add(origin.module)
    allocations = [
        Allocation(
            requested_bytes=requested,
            block_bytes=block,
            category=names[code],
            phase=alike.phase,
            module=next(iter(made_in)) if len(made_in := modules[requested, block, code, alike]) == 1 else alike.module,
            op=alike.op,
            source=alike.source,
            shape=alike.shape,
            dtype=alike.dtype,
            at_peak=at_peak,
            count=count,
        )
        for (requested, block, code, alike), count in counts.items()
    ]
    return sorted(allocations, key=lambda group: -group.block_bytes * group.count)


def _kinds(pieces: Integers, lifetimes: Lifetimes, codes: Codes, origins: Origins) -> Iterator[tuple[int, int]]:
    """The first of each kind of lifetimes, and how many of it there are; in the order of the first ones."""
    if not len(pieces):
        return
    sizes = [lifetimes.requested_bytes[pieces], lifetimes.block_bytes[pieces], codes[pieces].astype(np.int64)]
    columns = np.stack(sizes + origins.kinds(pieces))
    order = np.lexsort(columns)
    columns = columns[:, order]
    begins = np.flatnonzero(np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0)))
    counts = np.diff(np.append(begins, len(order)))
    total_bytes = lifetimes.block_bytes[pieces[order[begins]]] * counts
    kept = np.sort(np.argsort(-total_bytes, kind="stable")[:_MOST_KINDS])
    firsts, counts = pieces[order[begins[kept]]], counts[kept]
    in_order = np.argsort(firsts, kind="stable")
    yield from zip(firsts[in_order].tolist(), counts[in_order].tolist(), strict=True)
