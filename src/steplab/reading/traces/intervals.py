"""Exact lengths of time intervals: unions, overlaps, and shared instants.

Intervals are half-open, [start, end), in int64 nanoseconds, in any order.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from steplab.reading.traces.trace import Column

Shares = NDArray[np.float64]


def union(start_ns: Column, end_ns: Column) -> tuple[Column, Column]:
    """The same instants as ordered intervals that neither touch nor overlap."""
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
    """Each interval's part in [low, high); empty if outside."""
    return np.clip(start_ns, low_ns, high_ns), np.clip(end_ns, low_ns, high_ns)


def shares(start_ns: Column, end_ns: Column, group: Column, num_groups: int) -> Shares:
    """Nanoseconds per group; an instant covered by k intervals counts 1/k for each.

    `group` numbers each interval's group from 0. The shares sum to the union's length.
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
