"""Statistics against closed forms, the standard library and simulation."""

import dataclasses
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steplab.stats import bootstrap_interval, drift, steady_from, summarize

SAMPLES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40)
ROUNDING = np.finfo(np.float64).eps


def binomial_at_most(k: int, n: int, p: float) -> float:
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def median_of_a_resample_at_most(rank: int, n: int) -> float:
    """P(the median of n draws with replacement <= the sample of that rank), n odd.

    It is so if at least (n + 1) / 2 of the draws fall on the `rank` smallest samples.
    """
    return 1 - binomial_at_most((n - 1) // 2, n, rank / n)


def ranks_of_the_ideal_interval(n: int, confidence: float) -> tuple[int, int]:
    """Ranks of the samples at which the bootstrap interval ends, had it infinitely many resamples."""
    tail = (1 - confidence) / 2
    low = next(rank for rank in range(1, n + 1) if median_of_a_resample_at_most(rank, n) > tail)
    high = next(rank for rank in range(1, n + 1) if median_of_a_resample_at_most(rank, n) >= 1 - tail)
    return low, high


# --- summary ----------------------------------------------------------------------------------------------


@given(SAMPLES)
def test_a_summary_says_what_the_standard_library_says(samples: list[float]) -> None:
    summary = summarize(samples)
    # The mean of n doubles, summed in any order, is off by n - 1 roundings and that of the division.
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


def test_a_summary_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        summarize([1.0]).median = 2.0  # type: ignore[misc]


# --- bootstrap interval -----------------------------------------------------------------------------------


@given(SAMPLES)
def test_the_same_samples_always_give_the_same_interval(samples: list[float]) -> None:
    state = np.random.get_state(legacy=False)
    first = bootstrap_interval(samples)
    assert bootstrap_interval(np.asarray(samples)) == first
    np.testing.assert_equal(np.random.get_state(legacy=False), state)  # the global generator is left alone


@given(SAMPLES, st.integers(-20, 20))
def test_the_interval_scales_with_the_unit_of_the_samples(samples: list[float], exponent: int) -> None:
    low, high = bootstrap_interval(samples)
    scaled = bootstrap_interval([math.ldexp(sample, exponent) for sample in samples])
    assert scaled == (math.ldexp(low, exponent), math.ldexp(high, exponent))


# Numbers of samples for which the ideal interval is settled: no cumulative probability lies within five
# standard errors (of 2,000 resamples) of a tail, so that chance does not move the ends to a neighbour.
SETTLED = [(1, 0.95), (5, 0.95), (11, 0.95), (7, 0.9), (15, 0.9), (9, 0.8), (23, 0.8)]


@pytest.mark.parametrize(("n", "confidence"), SETTLED)
def test_the_interval_ends_at_the_samples_the_binomial_distribution_names(n: int, confidence: float) -> None:
    low, high = ranks_of_the_ideal_interval(n, confidence)
    ordered = np.sort(np.random.default_rng(1).lognormal(size=n))
    shuffled = np.random.default_rng(2).permutation(ordered)
    assert bootstrap_interval(shuffled, confidence) == (ordered[low - 1], ordered[high - 1])


@pytest.mark.parametrize(("n", "confidence"), SETTLED)
def test_the_interval_covers_the_true_median_as_often_as_theory_says(n: int, confidence: float) -> None:
    """The true median lies between two order statistics as often as a fair coin's heads fall between them.

    The number of hits is then binomial. Counts that are less likely than one in a million either way fail.
    """
    low, high = ranks_of_the_ideal_interval(n, confidence)
    coverage = binomial_at_most(high - 1, n, 0.5) - binomial_at_most(low - 1, n, 0.5)
    trials = 300
    rng = np.random.default_rng(n)
    hits = 0
    for _ in range(trials):
        below, above = bootstrap_interval(rng.lognormal(size=n), confidence)  # its median is 1
        hits += below <= 1.0 <= above
    assert binomial_at_most(hits, trials, coverage) > 1e-6
    assert binomial_at_most(hits - 1, trials, coverage) < 1 - 1e-6


def test_more_confidence_gives_a_wider_interval() -> None:
    samples = np.random.default_rng(3).lognormal(size=31)
    inner, outer = bootstrap_interval(samples, 0.5), bootstrap_interval(samples, 0.99)
    assert outer[0] < inner[0] < inner[1] < outer[1]


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


def test_a_second_slow_step_beside_the_first_is_not_forgiven() -> None:
    assert steady_from([9.0, *[1.0] * 9, 5.0, 5.0, *[1.0] * 3]) is None


@pytest.mark.parametrize(
    "curve",
    [[1.0, 2.0] * 6, [1.1**i for i in range(12)], [1.1**-i for i in range(12)], [5.0] * 7 + [1.0] * 5],
    ids=["alternating", "growing", "shrinking", "changes late"],
)
def test_steps_that_never_settle_are_not_steady(curve: list[float]) -> None:
    assert steady_from(curve) is None


@pytest.mark.parametrize("curve", [[], [1.0], [1.0, 1.0], [1.0, 1.0, 1.0]])
def test_fewer_than_four_steps_say_nothing(curve: list[float]) -> None:
    assert steady_from(curve) is None


@pytest.mark.parametrize("curve", [[9.0, 9.0, 1.0, 1.0], [5.0] * 5 + [1.0] * 5])
def test_the_steady_part_must_begin_in_the_first_half(curve: list[float]) -> None:
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
