"""Exact lengths of time intervals: unions, overlaps, shared times, and nesting on threads. Intervals are half-open,
[start, end), in int64 nanoseconds, in any order.
"""

import sys
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from steplab.reading.traces.trace import NONE, Column

Shares = NDArray[np.float64]


def union(start_ns: Column, end_ns: Column) -> tuple[Column, Column]:
    """Union as sorted intervals that neither touch nor overlap."""
    kept = end_ns > start_ns
    start_ns, end_ns = start_ns[kept], end_ns[kept]
    if not len(start_ns):
        return start_ns, end_ns
    order = np.argsort(start_ns, kind="stable")
    start_ns, reach_ns = start_ns[order], np.maximum.accumulate(end_ns[order])
    begins = np.concatenate(([True], start_ns[1:] > reach_ns[:-1]))
    ends = np.concatenate((begins[1:], [True]))
    return start_ns[begins], reach_ns[ends]


def stretches(*columns: Column) -> Iterator[tuple[int, int]]:
    if len(columns[0]):
        changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        yield from pairwise((0, *(np.flatnonzero(changes) + 1).tolist(), len(columns[0])))


def length(start_ns: Column, end_ns: Column) -> int:
    starts, ends = union(start_ns, end_ns)
    return int((ends - starts).sum())


def overlap(a: tuple[Column, Column], b: tuple[Column, Column]) -> int:
    # |A and B| = |A| + |B| - |A or B|
    both = np.concatenate((a[0], b[0])), np.concatenate((a[1], b[1]))
    return length(*a) + length(*b) - length(*both)


def clip(start_ns: Column, end_ns: Column, low_ns: int, high_ns: int) -> tuple[Column, Column]:
    """Part of each interval within [low, high); empty if outside."""
    return np.clip(start_ns, low_ns, high_ns), np.clip(end_ns, low_ns, high_ns)


def shares(start_ns: Column, end_ns: Column, group: Column, num_groups: int) -> Shares:
    """Nanoseconds per group, summing to the union; k overlapping intervals get 1/k each. `group` holds each interval's
    group number, from 0.
    """
    times = np.concatenate((start_ns, end_ns))
    order = np.argsort(times, kind="stable")
    lasts_ns = np.diff(times[order], append=times[order[-1:]])
    change = np.repeat(np.array([1, -1]), len(start_ns))[order]
    active = np.cumsum(change)
    per_interval = lasts_ns / np.maximum(active, 1)
    groups = np.concatenate((group, group))[order]
    found = np.zeros(num_groups)
    for number in np.unique(group):
        active_in_group = np.cumsum(np.where(groups == number, change, 0))
        found[number] = float((active_in_group * per_interval).sum())
    return found


class Nesting:
    """Parent of each interval on its thread; sorted by start, outer first. An interval that rounding makes outlast its
    parent ends with it.
    """

    parent: Column
    """Index of the enclosing interval; NONE if there is none."""

    def __init__(self, start_ns: Column, duration_ns: Column, thread: Column) -> None:
        self._borders: dict[int, tuple[Column, Column]] = {}
        starts, ends, parent = start_ns.tolist(), (start_ns + duration_ns).tolist(), [NONE] * len(start_ns)
        for number, rows in _by_thread(thread):
            self._borders[number] = _walk(rows.tolist(), starts, ends, parent)
        self.parent = np.array(parent, dtype=np.int64)

    def innermost(self, time_ns: Column, thread: Column) -> Column:
        found = np.full(len(time_ns), NONE)
        for number, here in _by_thread(thread):
            if number in self._borders:
                borders_ns, owners = self._borders[number]
                at = np.searchsorted(borders_ns, time_ns[here], side="right") - 1
                found[here] = np.append(owners, NONE)[at]
        return found

    @property
    def segments(self) -> tuple[Column, Column, Column]:
        """Start, end and index of each stretch of time with the same innermost interval, one thread after another."""
        none = np.zeros(0, dtype=np.int64)
        parts: list[tuple[Column, Column, Column]] = [(none, none, none)]
        for borders_ns, owners in self._borders.values():
            owned = (owners[:-1] != NONE) & (borders_ns[1:] > borders_ns[:-1])
            parts.append((borders_ns[:-1][owned], borders_ns[1:][owned], owners[:-1][owned]))
        starts, ends, owners = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return starts, ends, owners


def _walk(indices: list[int], starts: list[int], ends: list[int], parent: list[int]) -> tuple[Column, Column]:
    """Times at which a thread's innermost interval changes, with the new one. Also fills in the parents."""
    borders: list[int] = []
    owners: list[int] = []
    stack = [NONE]
    ends.append(sys.maxsize)  # the end of NONE, which surrounds all intervals
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
