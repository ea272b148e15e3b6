"""Which gradients travel together, for any parameters."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steplab.parallel.buckets import ALIGNMENT_BYTES, aligned, grouped, views_of

shapes = st.lists(st.integers(0, 5), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
devices = st.sampled_from(["cpu", "meta"])


@st.composite
def parameters(draw: st.DrawFn) -> list[nn.Parameter]:
    drawn = draw(st.lists(st.tuples(shapes, dtypes, devices), max_size=20))
    return [nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape, dtype, device in drawn]


def size_bytes(parameter: nn.Parameter) -> int:
    return aligned(parameter) * parameter.element_size()


@given(parameters(), st.integers(0, 600))
def test_every_parameter_is_in_one_bucket_that_is_no_larger_than_it_may_be(
    parameters: list[nn.Parameter], limit: int
) -> None:
    groups = grouped(parameters, limit)
    assert sorted(index for group in groups for index in group) == list(range(len(parameters)))
    assert all(a < b for group in groups for a, b in pairwise(group))
    for group in groups:
        assert len({(parameters[index].dtype, parameters[index].device) for index in group}) == 1
        assert len(group) == 1 or sum(size_bytes(parameters[index]) for index in group) <= limit
    assert [group[-1] for group in groups] == sorted(group[-1] for group in groups)  # as they become complete


@given(parameters(), st.integers(0, 600))
def test_a_bucket_is_closed_only_when_the_next_gradient_would_not_fit(
    parameters: list[nn.Parameter], limit: int
) -> None:
    latest: dict[object, list[int]] = {}
    for group in sorted(grouped(parameters, limit)):
        kind = parameters[group[0]].dtype, parameters[group[0]].device
        if kind in latest:
            filled = sum(size_bytes(parameters[index]) for index in latest[kind])
            assert filled + size_bytes(parameters[group[0]]) > limit
        latest[kind] = group


@given(parameters())
def test_without_a_limit_there_is_a_bucket_a_dtype_and_device(parameters: list[nn.Parameter]) -> None:
    assert len(grouped(parameters, float("inf"))) == len({(p.dtype, p.device) for p in parameters})


def test_gradients_in_a_bucket_begin_where_vectorised_reads_may() -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (3, 8, 9)]
    buffer = torch.zeros(sum(map(aligned, parameters)), dtype=torch.bfloat16)
    starts = [view.data_ptr() for view in views_of(buffer, parameters)]
    assert [start - starts[0] for start in starts] == [0, 16, 32]
    assert starts[0] % ALIGNMENT_BYTES == 0
