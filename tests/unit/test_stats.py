import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steplab.stats import drift, median_interval, steady_from, summarize

SAMPLES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40)
ROUNDING = np.finfo(np.float64).eps


def binomial_at_most(k: int, n: int, p: float) -> float:
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def interval_by_counting(n: int, confidence: float) -> tuple[int, int] | None:
    fitting = [
        rank
        for rank in range(1, n // 2 + 1)
        if sum(math.comb(n, heads) for heads in range(rank, n - rank + 1)) >= confidence * 2**n
    ]
    return (max(fitting), n + 1 - max(fitting)) if fitting else None


# --- summary ----------------------------------------------------------------------------------------------


@given(SAMPLES)
def test_a_summary_says_what_the_standard_library_says(samples: list[float]) -> None:
    summary = summarize(samples)
    # The mean of n doubles, summed in any order, is off by n roundings.
    slack = len(samples) * ROUNDING
    assert summary.count == len(samples)
    assert (summary.minimum, summary.maximum) == (min(samples), max(samples))
    assert summary.median == pytest.approx(statistics.median(samples), rel=ROUNDING, abs=0)
    assert summary.mean == pytest.approx(statistics.fmean(samples), rel=slack, abs=0)
    assert summary.low <= summary.median <= summary.high
    assert summary.minimum <= summary.quartile_1 <= summary.median <= summary.quartile_3 <= summary.maximum
    if len(samples) == 1:
        assert summary.stdev is None
    else:
        # Each squared deviation inherits the mean's error, which is relative to the largest sample.
        assert summary.stdev == pytest.approx(statistics.stdev(samples), rel=2 * slack, abs=2 * slack * max(samples))
        quartiles = statistics.quantiles(samples, n=4, method="inclusive")
        interpolation = pytest.approx([quartiles[0], quartiles[2]], rel=4 * ROUNDING, abs=0)
        assert [summary.quartile_1, summary.quartile_3] == interpolation


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


# --- interval of the median -------------------------------------------------------------------------------


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_the_interval_ends_at_the_samples_the_binomial_distribution_names(confidence: float) -> None:
    for n in range(120):
        shuffled = np.random.default_rng(n).permutation(np.arange(1, n + 1)).tolist()
        assert median_interval(shuffled, confidence) == interval_by_counting(n, confidence)


def test_so_many_samples_as_underflow_a_power_of_a_half_have_an_interval() -> None:
    interval = median_interval(range(100_000))
    assert interval is not None
    half = 1.96 * math.sqrt(100_000) / 2  # the binomial distribution is then normal
    assert interval == pytest.approx((50_000 - half, 50_000 + half), abs=2)


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "normal": lambda rng, size: rng.normal(0.0, 1.0, size),
    "a long tail": lambda rng, size: rng.lognormal(0.0, 1.0, size) - 1.0,
    "two modes": lambda rng, size: np.where(rng.random(size) < 0.5, rng.normal(-3, 1, size), rng.normal(3, 1, size)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [2, 5, 6, 10, 30])
def test_what_is_called_an_interval_holds_the_true_median_in_95_of_100_cases(n: int, name: str) -> None:
    trials = 400
    samples = DISTRIBUTIONS[name](np.random.default_rng(n), (trials, n)).tolist()
    summaries = [summarize(row) for row in samples]
    hits = sum(summary.low <= 0.0 <= summary.high for summary in summaries)
    assert {summary.is_interval for summary in summaries} == {n >= 6}
    if n >= 6:
        assert binomial_at_most(hits, trials, 0.95) > 1e-6
    else:  # the range, whose coverage of 1 - 2^(1 - n) is not called an interval
        assert 1e-6 < binomial_at_most(hits, trials, 1 - 2.0 ** (1 - n)) < 1 - 1e-6


# --- where the steps become steady ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curve", "first"),
    [
        ([1.0] * 4, 0),
        ([1.0] * 15, 0),
        ([9.0, *[1.0] * 14], 1),
        ([9.0, 2.0, 1.2, *[1.0] * 12], 3),
        ([2.0, 1.5, 1.25, 1.12, 1.06, 1.03, *[1.0] * 9], 5),
        ([0.5, 0.5, *[1.0] * 10], 2),
    ],
    ids=["four", "flat", "spike", "compile", "slow decay", "slows down"],
)
def test_steps_are_steady_from_the_end_of_the_warm_up(curve: list[float], first: int) -> None:
    assert steady_from(curve) == first


@pytest.mark.parametrize("late", range(3, 15))
def test_one_late_hiccup_is_no_warm_up(late: int) -> None:
    curve = [9.0, *[1.0] * 14]
    curve[late] = 5.0
    assert steady_from(curve) == 1


@pytest.mark.parametrize(
    "curve",
    [
        *([1.0, 2.0] * 6, [1.1**i for i in range(12)], [1.1**-i for i in range(12)], [5.0] * 7 + [1.0] * 5),
        [9.0, *[1.0] * 9, 5.0, 5.0, *[1.0] * 3],
    ],
    ids=["alternating", "growing", "shrinking", "changes late", "two slow steps"],
)
def test_steps_that_never_settle_are_not_steady(curve: list[float]) -> None:
    assert steady_from(curve) is None


@pytest.mark.parametrize("curve", [[], [1.0], [1.0, 1.0, 1.0], [9.0, 9.0, 1.0, 1.0], [5.0] * 5 + [1.0] * 5])
def test_four_steps_are_needed_and_the_steady_part_begins_in_the_first_half(curve: list[float]) -> None:
    assert steady_from(curve) is None


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=20), st.integers(-20, 20))
def test_where_steps_become_steady_does_not_depend_on_the_unit(curve: list[float], exponent: int) -> None:
    assert steady_from([math.ldexp(value, exponent) for value in curve]) == steady_from(curve)


def test_the_tolerance_is_relative_to_the_settled_time() -> None:
    curve = [11.0, *[10.0] * 9]
    assert steady_from(curve, tolerance=0.25) == 0
    assert steady_from(curve, tolerance=0.05) == 1


def test_a_drift_is_told_from_a_disturbance_that_the_median_bears() -> None:
    assert drift([3.0] * 10 + [1.0] * 5) == 3.0
    assert drift([1.0] * 8 + [3.0] * 12) == 3.0
    assert drift([1.0] * 10 + [3.0] * 5) == 1.0
    assert drift([3.0] * 5 + [1.0] * 3) == 1.0, "too few to tell"
