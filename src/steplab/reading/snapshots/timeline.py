"""Allocated bytes over time: in full, at every moment, for the peaks; and thinned, for a record and its chart."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from steplab.reading.snapshots.history import Codes, Integers
from steplab.reading.snapshots.positions import Positions
from steplab.reading.snapshots.replay import Lifetimes
from steplab.records.memory_marks import Stretch
from steplab.records.memory_profile import MemoryPhase, MemoryTimeline

MOST_POINTS = 500
"""The most points of a thinned timeline: more than a chart has columns, and few enough for a small record."""
_KEPT_BESIDE = 40
"""How many of those points are kept for peaks and the beginnings of phases."""


def bytes_over_time(lifetimes: Lifetimes, sizes: Integers) -> Integers:
    """The sum of the sizes of what is alive, at each moment."""
    change = np.zeros(lifetimes.num_events + 2, dtype=np.int64)
    np.add.at(change, lifetimes.start + 1, sizes)
    np.subtract.at(change, lifetimes.end + 1, sizes)
    sums: Integers = np.cumsum(change[:-1])
    return sums


def phase_moments(phases: Sequence[Stretch], positions: Positions, given_up: Integers) -> list[tuple[int, int]]:
    """The first and last moment of each phase.

    A release between two allocations may belong to the phase that ends there or to the one that begins. It counts to
    the first, up to the first event in `given_up`, the ascending events that release a gradient, which counts to the
    next.
    """

    def border(position: int) -> int:
        last = positions.last_moment(position)
        released = given_up[np.searchsorted(given_up, positions.first_moment(position)) :]
        return min(int(released[0]), last) if len(released) else last

    ends = [*(border(phase.end) for phase in phases[:-1]), *(positions.last_moment(p.end) for p in phases[-1:])]
    return [(border(phase.start), end) for phase, end in zip(phases, ends, strict=True)]


def phase_records(
    moments: Sequence[tuple[int, int]], phases: Sequence[Stretch], positions: Positions, allocated_bytes: Integers
) -> tuple[MemoryPhase, ...]:
    """The phases, each with its own peak; `moments` has the first and the last of each."""
    return tuple(
        MemoryPhase(
            name=phase.name,
            start_s=positions.seconds(first),
            end_s=positions.seconds(last),
            peak_bytes=int(allocated_bytes[first : last + 1].max()),
        )
        for phase, (first, last) in zip(phases, moments, strict=True)
    )


def timeline(
    lifetimes: Lifetimes,
    codes: Codes,
    names: Sequence[str],
    positions: Positions,
    allocated_bytes: Integers,
    phases: Sequence[tuple[int, int]],
) -> MemoryTimeline:
    """The timeline by category, thinned; categories that hold nothing at any time are left out.

    It keeps the first and the last moment, each phase's first moment and its peak, and of each of some equal stretches
    of time the highest and the lowest moment, so that it includes the peak. `names` are those of the codes; rounding is
    stacked on top of them. `phases` has the first and last moment of each.
    """
    moments = _chosen(positions, allocated_bytes, phases)
    rounding = lifetimes.block_bytes - lifetimes.requested_bytes
    rows = {}
    for code, name in enumerate(names):
        sizes = rounding if name == "rounding" else np.where(codes == code, lifetimes.requested_bytes, 0)
        if sizes.any():
            rows[name] = tuple(bytes_over_time(lifetimes, sizes)[moments].tolist())
    return MemoryTimeline(
        time_s=tuple(round(positions.seconds(moment), 6) for moment in moments.tolist()),
        categories=tuple(rows),
        allocated_bytes=tuple(rows.values()),
        by_event=positions.by_event,
    )


def _chosen(positions: Positions, allocated_bytes: Integers, phases: Iterable[tuple[int, int]]) -> Integers:
    count = len(allocated_bytes)
    if count <= MOST_POINTS:
        return np.arange(count)
    chosen = {0, count - 1}
    for first, last in list(phases)[: _KEPT_BESIDE // 2 - 2]:
        chosen |= {first, first + int(allocated_bytes[first : last + 1].argmax())}
    seconds = positions.all_seconds()
    edges = np.linspace(seconds[0], seconds[-1], (MOST_POINTS - _KEPT_BESIDE) // 2 + 1)[1:-1]
    borders = [0, *np.searchsorted(seconds, edges).tolist(), count]
    for first, stop in pairwise(borders):
        if first < stop:
            stretch = allocated_bytes[first:stop]
            chosen |= {first + int(stretch.argmax()), first + int(stretch.argmin())}
    return np.array(sorted(chosen))
