import itertools

import numpy as np
import pytest

from steplab.comparison.changes import _clearest_cut, change_points


def energy(x: list[float], y: list[float]) -> float:
    """Scaled energy distance of two samples, pair by pair (Matteson and James, equations 5 and 6)."""
    between = 2 * sum(abs(a - b) for a in x for b in y) / (len(x) * len(y))
    within = [
        sum(abs(a - b) for a, b in itertools.combinations(part, 2)) / (len(part) * (len(part) - 1) / 2)
        for part in (x, y)
    ]
    return (between - sum(within)) * len(x) * len(y) / (len(x) + len(y))


def test_the_clearest_cut_is_that_of_the_plain_formula() -> None:
    values = np.random.default_rng(0).normal(0, 1, 12).tolist()
    distances = np.abs(np.subtract.outer(values, values))
    expected = max((energy(values[:cut], values[cut:]), cut) for cut in range(3, 10))
    cut, clearest = _clearest_cut(distances)
    assert cut == expected[1]
    assert clearest == pytest.approx(expected[0])


def test_planted_changes_are_found_where_they_are() -> None:
    random = np.random.default_rng(1)
    values = np.concatenate([random.normal(level, 0.01, 15) for level in (1.0, 1.08, 0.97)])
    found = change_points(values.tolist(), threshold=0.01)
    assert [change.index for change in found] == [15, 30]
    assert [change.ratio for change in found] == [pytest.approx(1.08, rel=0.02), pytest.approx(0.97 / 1.08, rel=0.02)]


def test_one_slow_point_is_no_change_of_level() -> None:
    values = [1.0, 1.01, 0.99, 1.0, 1.02, 1.6, 1.0, 0.99, 1.01, 1.0, 1.0, 0.99]
    assert change_points(values, threshold=0.01) == ()


def test_noise_seldom_has_changes() -> None:
    """At a p of 1 %, four or more of 40 series have a probability below a thousandth."""
    random = np.random.default_rng(2)
    alarms = sum(bool(change_points(random.lognormal(0, 0.02, 20).tolist(), threshold=0.001)) for _ in range(40))
    assert alarms < 4


def test_a_change_below_the_threshold_is_not_marked() -> None:
    random = np.random.default_rng(3)
    values = np.concatenate([random.normal(1, 0.001, 10), random.normal(1.02, 0.001, 10)]).tolist()
    assert [change.index for change in change_points(values, threshold=0.01)] == [10]
    assert change_points(values, threshold=0.03) == ()


@pytest.mark.parametrize("count", [0, 1, 5])
def test_few_points_have_no_changes(count: int) -> None:
    assert change_points([1.0] * count, threshold=0.01) == ()


@pytest.mark.parametrize("count", [7, 8])
def test_orders_that_are_as_clear_count_whatever_their_sums_round_to(count: int) -> None:
    """One order in 35 of 7 or 8 points is as clear as the clearest, above the required p."""
    for seed in range(40):
        random = np.random.default_rng(seed)
        levels = [1.0] * (count // 2) + [random.uniform(1.1, 2)] * (count - count // 2)
        assert change_points((np.array(levels) * random.uniform(1, 1.001, count)).tolist(), threshold=0.01) == ()
