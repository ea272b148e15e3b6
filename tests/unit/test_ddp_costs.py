import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steplab.costs.data_parallel import Link, buckets_of, fit_link, state_bytes

links = st.builds(Link, bytes_per_s=st.floats(1e8, 1e12), call_s=st.floats(1e-7, 1e-2))
sizes = st.floats(1e6, 1e11)
counts = st.integers(1, 400)


def played_through_s(link: Link, num_bytes: float, num_buckets: int, backward_s: float) -> float:
    free_s = 0.0
    for bucket in range(1, num_buckets + 1):
        ready_s = backward_s * bucket / num_buckets
        free_s = max(free_s, ready_s) + link.call_s + num_bytes / num_buckets / link.bytes_per_s
    return free_s - backward_s


@given(links, sizes, counts, st.floats(0, 10))
def test_what_is_exposed_is_what_a_queue_of_buckets_leaves(
    link: Link, num_bytes: float, num_buckets: int, backward_s: float
) -> None:
    expected = played_through_s(link, num_bytes, num_buckets, backward_s)
    total_s = backward_s + link.alone_s(num_bytes, num_buckets)
    assert math.isclose(
        link.exposed_s(num_bytes, num_buckets, backward_s), expected, rel_tol=1e-9, abs_tol=1e-9 * total_s
    )


@given(links, sizes, counts)
def test_without_a_backward_pass_all_is_exposed_and_with_an_endless_one_the_last_bucket(
    link: Link, num_bytes: float, num_buckets: int
) -> None:
    assert math.isclose(link.exposed_s(num_bytes, num_buckets, 0), link.alone_s(num_bytes, num_buckets))
    assert math.isclose(link.exposed_s(num_bytes, num_buckets, 1e5), link.bucket_s(num_bytes, num_buckets))


@given(links, sizes)
def test_no_other_number_of_buckets_is_better_than_the_best(link: Link, num_bytes: float) -> None:
    best_bytes = link.best_bucket_bytes(num_bytes)
    assert best_bytes <= num_bytes
    best_s = link.least_serial_s(num_bytes)
    for step in range(-40, 41):
        num_buckets = max(num_bytes / best_bytes * 1.2**step, 1.0)
        assert link.serial_s(num_bytes, num_buckets) >= best_s * (1 - 1e-9)
    if best_bytes < num_bytes:
        assert math.isclose(best_s, 2 * math.sqrt(num_bytes * link.call_s / link.bytes_per_s))


def test_a_case_worked_by_hand() -> None:
    """8 GB at 200 GB/s and 40 us a call: n* = sqrt(40 ms / 40 us), 32 buckets of 253 MB, 2.53 ms."""
    link = Link(bytes_per_s=200e9, call_s=40e-6)
    assert link.alone_s(8e9, 100) == pytest.approx(0.044)
    assert link.serial_s(8e9, 100) == pytest.approx(0.0044)
    assert link.best_bucket_bytes(8e9) == pytest.approx(252.98e6, rel=1e-4)
    assert link.least_serial_s(8e9) == pytest.approx(2.5298e-3, rel=1e-4)
    assert link.exposed_s(8e9, 100, 0.132) == pytest.approx(0.00044)  # the link keeps up: the last bucket
    assert link.exposed_s(8e9, 10, 0.02) == pytest.approx(0.0224)  # it does not: 2 ms until the first, 40.4 ms of work


@given(links, sizes, st.lists(counts, min_size=2, max_size=8, unique=True))
def test_a_link_is_found_again_from_what_it_takes(link: Link, num_bytes: float, calls: list[int]) -> None:
    found = fit_link(calls, num_bytes, [link.alone_s(num_bytes, count) for count in calls])
    shares = [count * link.call_s / link.alone_s(num_bytes, count) for count in calls]
    if found is None or not (max(shares) > 0.01 and min(shares) < 0.99):
        return  # one is too small next to the other
    for count in (*calls, 1000):
        assert math.isclose(found.alone_s(num_bytes, count), link.alone_s(num_bytes, count), rel_tol=1e-3)


def test_too_little_for_a_link() -> None:
    assert fit_link([], 1e9, []) is None
    assert fit_link([7, 7], 1e9, [0.1, 0.2]) is None
    assert fit_link([1, 100], 1e9, [0.2, 0.1]) is None  # more calls in less time
    assert fit_link([1, 2], 1e9, [0.5, 0.5]) is None  # in the same time: no bucket would be best
    with pytest.raises(ValueError, match="0 s a call has no best bucket"):
        Link(bytes_per_s=1e9, call_s=0)


def test_buckets_are_at_least_one_and_at_most_the_gradients() -> None:
    assert [buckets_of(100e6, size, 21) for size in (1e9, 100e6, 10e6, 1e6)] == [1, 1, 10, 21]


@pytest.mark.parametrize(("stage", "expected"), [(0, (8, 8, 16)), (1, (8, 8, 4)), (2, (8, 2, 4)), (3, (2, 2, 4))])
def test_stages_of_zero_divide_state_then_gradients_then_parameters(stage: int, expected: tuple[int, ...]) -> None:
    held = state_bytes(2, parameter_bytes=4, states=2, size=4, stage=stage)
    assert (held.parameters, held.gradients, held.optimizer) == expected
