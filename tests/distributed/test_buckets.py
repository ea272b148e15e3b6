from itertools import pairwise
from math import prod
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steplab.parallel import sizes
from steplab.parallel.buckets import aligned, views_of
from steplab.parallel.sizes import ALIGNMENT_BYTES, aligned_bytes, grouped

shapes = st.lists(st.integers(0, 5), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
devices = st.sampled_from(["cpu", "meta"])


@st.composite
def parameters(draw: st.DrawFn) -> list[nn.Parameter]:
    drawn = draw(st.lists(st.tuples(shapes, dtypes, devices), max_size=20))
    return [nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape, dtype, device in drawn]


def size_bytes(parameter: nn.Parameter) -> int:
    return aligned_bytes(parameter.nbytes)


def groups_of(parameters: list[nn.Parameter], limit: float) -> list[list[int]]:
    return grouped([p.nbytes for p in parameters], limit, [(p.dtype, p.device) for p in parameters])


@given(parameters(), st.integers(0, 600))
def test_every_parameter_is_in_one_bucket_that_is_no_larger_than_it_may_be(
    parameters: list[nn.Parameter], limit: int
) -> None:
    groups = groups_of(parameters, limit)
    assert sorted(index for group in groups for index in group) == list(range(len(parameters)))
    assert all(a < b for group in groups for a, b in pairwise(group))
    for group in groups:
        assert len({(parameters[index].dtype, parameters[index].device) for index in group}) == 1
        filled = sum(size_bytes(parameters[index]) for index in group)
        assert len(group) == 1 or filled <= most_bytes(parameters, group[0], limit)
    assert [group[-1] for group in groups] == sorted(group[-1] for group in groups)  # as they become complete


@given(parameters(), st.integers(0, 600))
def test_a_bucket_is_closed_only_when_the_next_gradient_would_not_fit(
    parameters: list[nn.Parameter], limit: int
) -> None:
    latest: dict[object, list[int]] = {}
    for group in sorted(groups_of(parameters, limit)):
        kind = parameters[group[0]].dtype, parameters[group[0]].device
        if kind in latest:
            filled = sum(size_bytes(parameters[index]) for index in latest[kind])
            assert filled + size_bytes(parameters[group[0]]) > most_bytes(parameters, latest[kind][0], limit)
        latest[kind] = group


def most_bytes(parameters: list[nn.Parameter], first: int, limit: int) -> float:
    return min(limit, max(sum(map(size_bytes, parameters[first:])) / 2, limit / 8))


def test_the_last_buckets_are_small_whatever_the_limit_is() -> None:
    for limit, expected in [(40, [40, 30, 15, 7, 5, 3]), (16, [16] * 5 + [10, 5, 2, 2, 1])]:
        assert [len(group) for group in grouped([16] * 100, 16 * limit)] == expected


@given(st.lists(shapes, max_size=20), st.integers(1, 9), st.integers(1, 3))
def test_the_parts_of_chunks_cover_a_bucket_and_are_equal_but_for_pages(
    shapes: list[list[int]], size: int, part_pages: int
) -> None:
    members = [4 * prod(10 * n for n in shape) for shape in shapes]
    with patch.object(sizes, "PART_BYTES", part_pages * sizes.PAGE):
        division = sizes.divided(members, size, None)
    borders = [border for chunk in division.chunks for border in chunk]
    assert (borders[0], borders[-1]) == (0, sum(map(aligned_bytes, members)))
    assert all(a[-1] == b[0] for a, b in pairwise(division.chunks))
    parts = [end - begin for chunk in division.chunks for begin, end in pairwise(chunk)]
    assert 0 <= min(parts) <= max(parts) <= part_pages * sizes.PAGE
    assert division.landing_bytes == sizes.pages(-(-borders[-1] // size))
    covered = [0] * len(members)
    for number in range(len(division.chunks)):
        for rank in range(size):
            for overlap in division.overlaps(number, rank):
                assert overlap.in_gradient == covered[overlap.gradient]
                covered[overlap.gradient] += overlap.num_bytes
    assert covered == members


@given(parameters())
def test_without_a_limit_there_is_a_bucket_a_dtype_and_device(parameters: list[nn.Parameter]) -> None:
    assert len(groups_of(parameters, float("inf"))) == len({(p.dtype, p.device) for p in parameters})


def test_gradients_in_a_bucket_begin_where_vectorised_reads_may() -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (3, 8, 9)]
    buffer = torch.zeros(sum(map(aligned, parameters)), dtype=torch.bfloat16)
    starts = [view.data_ptr() for view in views_of(buffer, parameters)]
    assert [start - starts[0] for start in starts] == [0, 16, 32]
    assert starts[0] % ALIGNMENT_BYTES == 0
