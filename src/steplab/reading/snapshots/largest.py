"""The largest allocations, equal ones grouped."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from steplab.reading.snapshots.history import Codes, Flags, Integers
from steplab.reading.snapshots.made import Origin, Origins
from steplab.reading.snapshots.replay import Lifetimes
from steplab.records.memory_profile import Allocation
from steplab.records.module_names import without_numbers

_MOST_AT_PEAK, _MOST_OTHERS = 25, 10
_Alike = tuple[int, int, Origin]
_MOST_KINDS = 50_000


def largest(
    lifetimes: Lifetimes, codes: Codes, names: Sequence[str], origins: Origins, peak_moment: int
) -> tuple[Allocation, ...]:
    """Groups of equal allocations by total bytes: first alive at the peak, then others."""
    alive = alive_at(lifetimes, peak_moment)
    at_peak = _groups(np.flatnonzero(alive), lifetimes, codes, names, origins, at_peak=True)
    others = _groups(np.flatnonzero(~alive), lifetimes, codes, names, origins, at_peak=False)
    return (*_most(at_peak, _MOST_AT_PEAK), *others[:_MOST_OTHERS])


def _most(groups: list[Allocation], limit: int) -> list[Allocation]:
    chosen = groups[:limit]
    widest = max(groups, key=lambda group: group.requested_bytes, default=None)
    return chosen if widest is None or widest in chosen else [*chosen[:-1], widest]


def alive_at(lifetimes: Lifetimes, moment: int) -> Flags:
    alive: Flags = (lifetimes.start < moment) & (lifetimes.end >= moment)
    return alive


def _groups(
    pieces: Integers, lifetimes: Lifetimes, codes: Codes, names: Sequence[str], origins: Origins, *, at_peak: bool
) -> list[Allocation]:
    counts, totals = Counter[_Alike](), Counter[_Alike]()
    modules = defaultdict[_Alike, set[str | None]](set)
    for piece, count, total_bytes in _kinds(pieces, lifetimes, codes, origins):
        origin = origins.of(piece)
        pattern = replace(origin, module=without_numbers(origin.module)) if origin.module else origin
        alike = (int(lifetimes.requested_bytes[piece]), int(codes[piece]), pattern)
        counts[alike] += count
        totals[alike] += total_bytes
        modules[alike].add(origin.module)
    ordered = sorted(counts, key=lambda alike: -totals[alike])
    return [
        Allocation(
            requested_bytes=requested,
            block_bytes=totals[alike] // counts[alike],
            category=names[code],
            phase=origin.phase,
            module=next(iter(modules[alike])) if len(modules[alike]) == 1 else origin.module,
            op=origin.op,
            source=origin.source,
            shape=origin.shape,
            dtype=origin.dtype,
            at_peak=at_peak,
            count=counts[alike],
        )
        for alike in ordered
        for requested, code, origin in [alike]
    ]


def _kinds(pieces: Integers, lifetimes: Lifetimes, codes: Codes, origins: Origins) -> Iterator[tuple[int, int, int]]:
    if not len(pieces):
        return
    sizes = [lifetimes.requested_bytes[pieces], codes[pieces].astype(np.int64)]
    columns = np.stack(sizes + origins.kinds(pieces))
    order = np.lexsort(columns)
    columns = columns[:, order]
    begins = np.flatnonzero(np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0)))
    counts = np.diff(np.append(begins, len(order)))
    total_bytes = np.add.reduceat(lifetimes.block_bytes[pieces[order]], begins)
    kept = np.argsort(-total_bytes, kind="stable")[:_MOST_KINDS]
    kept = kept[np.argsort(order[begins[kept]])]
    yield from zip(pieces[order[begins[kept]]].tolist(), counts[kept].tolist(), total_bytes[kept].tolist(), strict=True)
