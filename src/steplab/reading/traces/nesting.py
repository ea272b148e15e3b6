"""Finds the innermost of nested intervals on a thread at an instant."""

import sys
from collections.abc import Iterator

import numpy as np

from steplab.reading.traces.intervals import stretches
from steplab.reading.traces.trace import NONE, Column


class Nesting:
    """Intervals nested within their thread, ordered by start, outer before inner.

    An interval that rounding makes outlast its parent ends with it.
    """

    parent: Column
    """Index of the surrounding interval; NONE at the outermost level."""

    def __init__(self, start_ns: Column, duration_ns: Column, thread: Column) -> None:
        self._borders: dict[int, tuple[Column, Column]] = {}
        starts, ends, parent = start_ns.tolist(), (start_ns + duration_ns).tolist(), [NONE] * len(start_ns)
        for number, rows in _by_thread(thread):
            self._borders[number] = _walk(rows.tolist(), starts, ends, parent)
        self.parent = np.array(parent, dtype=np.int64)

    def innermost(self, time_ns: Column, thread: Column) -> Column:
        """Index of the innermost interval at each time and thread; NONE without one."""
        found = np.full(len(time_ns), NONE)
        for number, here in _by_thread(thread):
            if number in self._borders:
                borders_ns, owners = self._borders[number]
                at = np.searchsorted(borders_ns, time_ns[here], side="right") - 1
                found[here] = np.where(at >= 0, owners[np.maximum(at, 0)], NONE)
        return found

    @property
    def segments(self) -> tuple[Column, Column, Column]:
        """Start, end and owner of stretches with one innermost interval, over all threads."""
        parts: list[tuple[Column, Column, Column]] = []
        for borders_ns, owners in self._borders.values():
            owned = (owners[:-1] != NONE) & (borders_ns[1:] > borders_ns[:-1])
            parts.append((borders_ns[:-1][owned], borders_ns[1:][owned], owners[:-1][owned]))
        if not parts:
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, empty
        starts, ends, owners = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return starts, ends, owners


def _walk(indices: list[int], starts: list[int], ends: list[int], parent: list[int]) -> tuple[Column, Column]:
    """Instants where a thread's innermost interval changes, and the interval from there; fills in the parents."""
    borders: list[int] = []
    owners: list[int] = []
    stack = [NONE]
    ends.append(sys.maxsize)  # of NONE, around all
    for index in indices:
        start, end = starts[index], ends[index]
        while ends[stack[-1]] <= start:
            borders.append(ends[stack.pop()])
            owners.append(stack[-1])
        above = parent[index] = stack[-1]
        ends[index] = min(end, ends[above])
        stack.append(index)
        borders.append(start)
        owners.append(index)
    while len(stack) > 1:
        borders.append(ends[stack.pop()])
        owners.append(stack[-1])
    ends.pop()
    return np.array(borders, dtype=np.int64), np.array(owners, dtype=np.int64)


def _by_thread(thread: Column) -> Iterator[tuple[int, Column]]:
    order = np.argsort(thread, kind="stable")
    for first, stop in stretches(thread[order]):
        yield int(thread[order[first]]), order[first:stop]
