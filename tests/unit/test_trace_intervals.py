from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steplab.reading.traces.intervals import Nesting, clip, length, overlap, shares, union
from steplab.reading.traces.trace import NONE, Column

END = 60
intervals = st.lists(st.tuples(st.integers(0, END), st.integers(0, END)).map(sorted), max_size=12)


def columns(pairs: list[list[int]]) -> tuple[Column, Column]:
    return tuple(np.array([pair[i] for pair in pairs], dtype=np.int64) for i in range(2))  # type: ignore[return-value]


def covered(pairs: list[list[int]]) -> list[int]:
    return [sum(start <= t < end for start, end in pairs) for t in range(END)]


@given(intervals)
def test_a_union_covers_the_same_nanoseconds_once(pairs: list[list[int]]) -> None:
    starts, ends = union(*columns(pairs))
    merged = [[int(a), int(b)] for a, b in zip(starts, ends, strict=True)]
    assert [min(count, 1) for count in covered(pairs)] == covered(merged)
    assert all(before[1] < after[0] for before, after in pairwise(merged))


@given(intervals)
def test_length_counts_the_covered_nanoseconds(pairs: list[list[int]]) -> None:
    assert length(*columns(pairs)) == sum(count > 0 for count in covered(pairs))


@given(intervals, intervals)
def test_overlap_counts_the_nanoseconds_in_both(a: list[list[int]], b: list[list[int]]) -> None:
    both = sum(x > 0 and y > 0 for x, y in zip(covered(a), covered(b), strict=True))
    assert overlap(columns(a), columns(b)) == both


@given(intervals, st.integers(0, END), st.integers(0, END))
def test_clipping_leaves_what_lies_within(pairs: list[list[int]], x: int, y: int) -> None:
    low, high = sorted((x, y))
    expected = sum(count > 0 for t, count in enumerate(covered(pairs)) if low <= t < high)
    assert length(*clip(*columns(pairs), low, high)) == expected


@given(intervals, st.data())
def test_an_instant_is_shared_equally_among_those_that_cover_it(pairs: list[list[int]], data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(pairs), max_size=len(pairs)))
    expected = np.zeros(4)
    for t in range(END):
        here = [group for group, (start, end) in zip(groups, pairs, strict=True) if start <= t < end]
        for group in here:
            expected[group] += 1 / len(here)
    found = shares(*columns(pairs), np.array(groups, dtype=np.int64), 4)
    assert found == pytest.approx(expected)
    assert found.sum() == pytest.approx(length(*columns(pairs)))


# --- nesting ----------------------------------------------------------------------------------------------


@st.composite
def nested(draw: st.DrawFn, low: int = 0, high: int = END, depth: int = 3) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    at = low
    while at < high and draw(st.booleans()):
        start = draw(st.integers(at, high - 1))
        end = draw(st.integers(start + 1, high))
        found.append((start, end))
        if depth:
            found += draw(nested(start, end, depth - 1))
        at = end
    return found


def innermost(pairs: list[tuple[int, int]], time: int) -> int:
    return max((i for i, (start, end) in enumerate(pairs) if start <= time < end), default=NONE)


@given(nested(), nested())
def test_the_innermost_interval_of_a_thread(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    both = sorted([(pair, 0) for pair in first] + [(pair, 1) for pair in second], key=lambda x: (x[0][0], -x[0][1]))
    starts, ends = (np.array([pair[i] for pair, _ in both], dtype=np.int64) for i in range(2))
    threads = np.array([thread for _, thread in both], dtype=np.int64)
    nesting = Nesting(starts, ends - starts, threads)
    for thread in range(2):
        mine = [i for i, (_, t) in enumerate(both) if t == thread]
        pairs = [both[i][0] for i in mine]
        times = np.arange(-1, END + 1, dtype=np.int64)
        found = nesting.innermost(times, np.full(len(times), thread))
        expected = [mine[i] if (i := innermost(pairs, t)) != NONE else NONE for t in times.tolist()]
        assert found.tolist() == expected


@given(nested())
def test_segments_give_each_interval_the_time_its_children_leave(pairs: list[tuple[int, int]]) -> None:
    starts, ends = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in range(2))
    nesting = Nesting(starts, ends - starts, np.zeros(len(pairs), dtype=np.int64))
    own = [0] * len(pairs)
    for start, end, owner in zip(*nesting.segments, strict=True):
        own[owner] += int(end - start)
    expected = [sum(innermost(pairs, t) == i for t in range(END)) for i in range(len(pairs))]
    assert own == expected


def test_a_child_that_outlasts_its_parent_ends_with_it() -> None:
    starts, durations = np.array([0, 5, 12]), np.array([10, 6, 2])  # the second would end at 11
    nesting = Nesting(starts, durations, np.zeros(3, dtype=np.int64))
    assert nesting.parent.tolist() == [NONE, 0, NONE]
    assert nesting.innermost(np.array([9, 10, 11]), np.zeros(3, dtype=np.int64)).tolist() == [1, NONE, NONE]
