"""Converts marks' positions and events' indices to moments and times, and computes allocated bytes at each moment.

Position p lies between the p-th alloc event and the next. Moment 0 lies before the first event of any kind, moment m
between the m-th and the next.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from steplab.reading.snapshots.history import ALLOC, NONE, Codes, Events, Integers, Numbers
from steplab.reading.snapshots.replay import Lifetimes
from steplab.records.memory_marks import Stretch
from steplab.records.memory_profile import MemoryPhase, MemoryTimeline

Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]


class Positions:
    def __init__(self, events: Events) -> None:
        self.num_events = len(events)
        self._allocations = np.flatnonzero(events.action == ALLOC)
        self.num_allocations = len(self._allocations)
        self.by_event = not len(events) or bool((events.time_us == NONE).any())
        """True if `seconds` are event numbers, because times are missing."""
        if self.by_event:
            self.all_seconds: Seconds = np.arange(self.num_events + 1, dtype=np.float64)
        else:
            since_us = np.maximum.accumulate(events.time_us) - events.time_us[0]
            self.all_seconds = np.append(0.0, since_us / 1e6)

    def last_moment(self, position: int) -> int:
        if position >= self.num_allocations:
            return self.num_events
        return int(self._allocations[max(position, 0)])

    def first_moments(self, positions: Sequence[int]) -> Integers:
        moments = np.append(0, self._allocations + 1)
        chosen: Integers = moments[np.clip(np.array(positions, dtype=np.int64), 0, self.num_allocations)]
        return chosen

    def ordinals(self, starts: Integers) -> Integers:
        """Number of each event `starts` among the alloc events, from 0; NONE before the history."""
        ordinals: Integers = np.searchsorted(self._allocations, starts)
        return np.where(starts == NONE, NONE, ordinals)

    def seconds(self, moment: int) -> float:
        """Seconds from the first event to the event before a moment."""
        return float(self.all_seconds[moment])

    def innermost(self, stretches: Sequence[Stretch]) -> Numbers:
        """Index of the innermost stretch around each allocation; NONE if none. Outer stretches come first, so the last
        match wins.
        """
        numbers: Numbers = np.full(self.num_allocations, NONE, dtype=np.int32)
        for number, stretch in enumerate(stretches):
            numbers[max(stretch.start, 0) : max(stretch.end, 0)] = number
        return numbers


class Residents:
    def __init__(self, lifetimes: Lifetimes, positions: Positions) -> None:
        self._positions, self._end = positions, lifetimes.end
        self._order = np.lexsort((lifetimes.start, lifetimes.address))
        self._addresses, group = np.unique(lifetimes.address[self._order], return_inverse=True)
        self._stride = lifetimes.num_events + 2
        self._keys = group * self._stride + lifetimes.start[self._order] + 1

    def find(self, addresses: Sequence[int], positions: Sequence[int]) -> Integers:
        """Index of the allocation alive at each address and position; NONE if none."""
        if not len(self._keys) or not len(addresses):
            return np.full(len(addresses), NONE)
        wanted = np.array(addresses, dtype=np.int64)
        moments = self._positions.first_moments(positions)
        group = np.minimum(np.searchsorted(self._addresses, wanted), len(self._addresses) - 1)
        # a lifetime beginning with event e exists from moment e + 1 on
        row = np.searchsorted(self._keys, group * self._stride + moments, side="right") - 1
        found = self._order[np.maximum(row, 0)]
        there = (row >= 0) & (self._keys[np.maximum(row, 0)] >= group * self._stride) & (self._end[found] >= moments)
        return np.where(there & (self._addresses[group] == wanted), found, NONE)


MOST_POINTS = 500
"""Most points of a thinned timeline: more than a chart's columns, yet a small record."""
_KEPT_BESIDE = 40


def bytes_over_time(lifetimes: Lifetimes, sizes: Integers) -> Integers:
    change = np.zeros(lifetimes.num_events + 2, dtype=np.int64)
    np.add.at(change, lifetimes.start + 1, sizes)
    np.subtract.at(change, lifetimes.end + 1, sizes)
    sums: Integers = np.cumsum(change[:-1])
    return sums


def phase_moments(phases: Sequence[Stretch], positions: Positions, given_up: Integers) -> list[tuple[int, int]]:
    """First and last moment of each phase. Releases between two phases belong to the earlier one, but only up to the
    first event in `given_up`, the sorted releases of gradients: these belong to the later one.
    """

    def border(position: int) -> int:
        last = positions.last_moment(position)
        (first,) = positions.first_moments([position])
        released = given_up[np.searchsorted(given_up, first) :]
        return min(int(released[0]), last) if len(released) else last

    ends = [*(border(phase.end) for phase in phases[:-1]), *(positions.last_moment(p.end) for p in phases[-1:])]
    return [(border(phase.start), end) for phase, end in zip(phases, ends, strict=True)]


def phase_records(
    moments: Sequence[tuple[int, int]], phases: Sequence[Stretch], positions: Positions, allocated_bytes: Integers
) -> tuple[MemoryPhase, ...]:
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
    """Allocated bytes over time by category, without empty categories, at no more than MOST_POINTS moments.

    Kept are the first and last moment, the start and peak of each phase, and the lowest and highest moment in equal
    intervals of time, hence the overall peak. `codes` index into `names`; `phases` holds first and last moments.
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
    seconds = positions.all_seconds
    edges = np.linspace(seconds[0], seconds[-1], (MOST_POINTS - _KEPT_BESIDE) // 2 + 1)[1:-1]
    borders = [0, *np.searchsorted(seconds, edges).tolist(), count]
    for first, stop in pairwise(borders):
        if first < stop:
            stretch = allocated_bytes[first:stop]
            chosen |= {first + int(stretch.argmax()), first + int(stretch.argmin())}
    return np.array(sorted(chosen))
