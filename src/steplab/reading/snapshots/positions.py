"""Translates between marks, events and times.

A *position* counts allocations: position p lies between the p-th alloc event and the next. A *moment* counts events:
moment 0 lies before the first, moment m between the m-th and the next; what is allocated changes from one to the other.
"""

from collections.abc import Sequence

import numpy as np

from steplab.reading.snapshots.history import ALLOC, NONE, Events, Integers, Numbers
from steplab.reading.snapshots.replay import Lifetimes
from steplab.records.memory_marks import Stretch

Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]


class Positions:
    """The events of a history by the allocations among them, and by the clock."""

    def __init__(self, events: Events) -> None:
        self.num_events = len(events)
        self._allocations = np.flatnonzero(events.action == ALLOC)
        self.num_allocations = len(self._allocations)
        self.by_event = not len(events) or bool((events.time_us == NONE).any())
        """Whether seconds are numbers of events, because the history has no times."""
        if self.by_event:
            self._seconds: Seconds = np.arange(self.num_events, dtype=np.float64) + 1
        else:
            since_us = np.maximum.accumulate(events.time_us) - events.time_us[0]
            self._seconds = since_us / 1e6

    def first_moment(self, position: int) -> int:
        """The moment right after the last allocation before a position."""
        if position <= 0 or not self.num_allocations:
            return 0
        return int(self._allocations[min(position, self.num_allocations) - 1]) + 1

    def last_moment(self, position: int) -> int:
        """The moment right before the next allocation after a position."""
        if position >= self.num_allocations:
            return self.num_events
        return int(self._allocations[max(position, 0)])

    def first_moments(self, positions: Sequence[int]) -> Integers:
        """The first_moment of each position."""
        moments = np.append(0, self._allocations + 1)
        chosen: Integers = moments[np.clip(np.array(positions, dtype=np.int64), 0, self.num_allocations)]
        return chosen

    def ordinals(self, starts: Integers) -> Integers:
        """The ordinal of each of these events among the history's allocations, from 0; NONE for a start before the
        history."""
        ordinals: Integers = np.searchsorted(self._allocations, starts)
        return np.where(starts == NONE, NONE, ordinals)

    def seconds(self, moment: int) -> float:
        """The time of the event before a moment, in seconds since the first event."""
        return float(self._seconds[moment - 1]) if moment else 0.0

    def all_seconds(self) -> Seconds:
        """The time of each moment."""
        return np.append(0.0, self._seconds)

    def innermost(self, stretches: Sequence[Stretch]) -> Numbers:
        """For each allocation the number of the last of the stretches around it; NONE for none.

        The stretches are in the order of their beginnings, outer before inner, so that the last is the innermost.
        """
        numbers: Numbers = np.full(self.num_allocations, NONE, dtype=np.int32)
        for number, stretch in enumerate(stretches):
            numbers[max(stretch.start, 0) : max(stretch.end, 0)] = number
        return numbers


class Residents:
    """The lifetimes by address and position."""

    def __init__(self, lifetimes: Lifetimes, positions: Positions) -> None:
        self._positions, self._end = positions, lifetimes.end
        self._order = np.lexsort((lifetimes.start, lifetimes.address))
        self._addresses, group = np.unique(lifetimes.address[self._order], return_inverse=True)
        self._stride = lifetimes.num_events + 2
        self._keys = group * self._stride + lifetimes.start[self._order] + 1

    def find(self, addresses: Sequence[int], positions: Sequence[int]) -> Integers:
        """The number of the lifetime at each address at each position; NONE for none."""
        if not len(self._keys) or not len(addresses):
            return np.full(len(addresses), NONE)
        wanted = np.array(addresses, dtype=np.int64)
        moments = self._positions.first_moments(positions)
        group = np.minimum(np.searchsorted(self._addresses, wanted), len(self._addresses) - 1)
        # a lifetime that begins with event e exists from moment e + 1 on
        row = np.searchsorted(self._keys, group * self._stride + moments, side="right") - 1
        found = self._order[np.maximum(row, 0)]
        there = (row >= 0) & (self._keys[np.maximum(row, 0)] >= group * self._stride) & (self._end[found] >= moments)
        return np.where(there & (self._addresses[group] == wanted), found, NONE)
