import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.stored_records import stored
from tests.sure import sure

from steplab.comparison.samples import FEWEST, SEPARATE, mann_whitney, mann_whitney_in_turns
from steplab.comparison.samples import compare_samples as compare_lists
from steplab.records.comparison import Ratio
from steplab.records.disturbances import disturbances
from steplab.records.run import Run

Samples = NDArray[np.float64]


def compare_samples(a: Any, b: Any, *, in_turns: bool, threshold: float | None = None, num_decided: int = 1) -> Ratio:
    lists = ([list(map(float, block)) for block in side] for side in (a, b))
    return compare_lists(*lists, in_turns=in_turns, threshold=threshold, num_decided=num_decided)


def recorded(name: str, fewest: int) -> list[tuple[Samples, bool]]:
    found = []
    for run in stored(name, Run):
        step = run.timing.phase("step") if run.timing else None
        if step and len(step.best_s) >= fewest:
            found.append((np.array(step.best_s), bool(disturbances(run))))
    return found


def resampled(samples: Samples, count: int, length: int, random: np.random.Generator) -> Samples:
    starts = random.integers(0, len(samples), -(-count // length))
    return samples[((starts[:, None] + np.arange(length)) % len(samples)).ravel()[:count]]


# --- the tests against enumeration ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_mann_whitney_counts_all_ways_to_choose_which_samples_are_a(seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 9, 9).astype(float)  # with ties
    ranks = [(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values]
    sums = np.array([sum(chosen) for chosen in itertools.combinations(ranks, 4)])
    observed = sum(ranks[:4])
    expected = min(1.0, 2 * min((sums <= observed).mean(), (sums >= observed).mean()))
    assert mann_whitney(values[:4], values[4:]) == pytest.approx(expected)


def test_mann_whitney_of_many_samples_is_close_to_a_permutation_test() -> None:
    random = np.random.default_rng(1)
    a, b = random.normal(0, 1, 25), random.normal(0.6, 1, 30)
    order = np.concatenate([a, b]).argsort().argsort() + 1
    sums = np.array([random.permutation(order)[:25].sum() for _ in range(20_000)])
    expected = (np.abs(sums - sums.mean()) >= abs(order[:25].sum() - 25 * 28)).mean()
    # The standard error of a share of 20,000 drawn ways, three times.
    assert mann_whitney(a, b) == pytest.approx(expected, abs=3 * np.sqrt(expected / 20_000) + 1e-3)


def test_in_turns_all_ways_to_exchange_within_turns_are_counted() -> None:
    a, b = np.arange(0.0, 8)[:, None], np.arange(0.0, 8)[:, None] + 0.5
    assert mann_whitney_in_turns(a, b) == 2 / 2**8
    assert mann_whitney(a.ravel(), b.ravel()) > 0.5


def test_in_turns_a_way_as_far_apart_as_the_one_observed_counts_whatever_its_sum_rounds_to() -> None:
    """Mean ranks of five samples are not binary fractions; the two ways with equal signs are 2 of 2^6."""
    for seed in range(100):
        random = np.random.default_rng(seed)
        a, b = random.normal(1, 0.01, (6, 5)), random.normal(2, 0.01, (6, 5))
        assert mann_whitney_in_turns(a, b) >= 2 / 2**6


# --- decisions --------------------------------------------------------------------------------------------


def test_samples_three_per_cent_apart_are_told_apart_and_the_reverse_is_lower() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(1, 0.005, 30), random.normal(1.03, 0.005, 30)
    found = compare_samples([a], [b], in_turns=False, threshold=0.01)
    assert found.decision == "higher"
    assert found.exceeds is True
    assert found.low is not None
    assert found.high is not None
    assert found.low < 1.03 < found.high
    assert found.ratio == np.median(b) / np.median(a)
    assert compare_samples([b], [a], in_turns=False, threshold=0.01).decision == "lower"


def test_one_process_a_side_has_the_threshold_of_processes() -> None:
    a = np.random.default_rng(0).normal(1, 0.002, 30)
    found = compare_samples([a], [a * 1.03], in_turns=False)
    assert (found.decision, found.exceeds, found.threshold) == ("same", False, SEPARATE)


def test_a_drift_that_both_sides_share_cancels_in_turns() -> None:
    random = np.random.default_rng(0)
    drift = 1 + 0.1 * np.sin(np.arange(30) / 5)
    a, b = drift * random.normal(1, 0.004, 30), 1.03 * drift * random.normal(1, 0.004, 30)
    turns = compare_samples(a[:, None], b[:, None], in_turns=True)
    assert turns.decision == "higher"
    assert turns.ratio == pytest.approx(1.03, rel=0.01)
    assert compare_samples([a], [b], in_turns=False, threshold=0.01).decision == "undecided"


def test_what_is_undecided_is_decided_with_about_as_many_samples_as_said() -> None:
    random = np.random.default_rng(3)

    def drawn(count: int) -> list[list[float]]:
        return [random.normal(1, 0.03, count).tolist()]

    found = compare_samples(drawn(30), drawn(30), in_turns=False, threshold=0.01)
    assert found.decision == "undecided"
    wanted = 30 + sure(found.more)
    assert compare_samples(drawn(wanted), drawn(wanted), in_turns=False, threshold=0.01).decision == "same"


def test_too_few_samples_decide_nothing_and_say_how_many_are_missing() -> None:
    found = compare_samples([[1.0, 1.1, 1.0]], [[2.0, 2.1, 2.0]], in_turns=False)
    assert (found.decision, found.low, found.high, found.p, found.more) == ("undecided", None, None, None, FEWEST - 3)


def test_ratios_decided_together_need_more_turns_and_say_how_many() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(1, 0.001, (8, 3)), random.normal(1.1, 0.001, (8, 3))
    assert compare_samples(a[:6], b[:6], in_turns=True).decision == "higher"
    found = compare_samples(a[:6], b[:6], in_turns=True, num_decided=4)
    assert (found.decision, found.more) == ("undecided", 2)
    assert compare_samples(a[:7], b[:7], in_turns=True, num_decided=4).decision == "undecided"
    assert compare_samples(a, b, in_turns=True, num_decided=4).decision == "higher"


def test_an_interval_beyond_the_threshold_that_decides_nothing_says_why() -> None:
    a = [0.515, 1.661, 0.700, 3.054, 0.690, 0.583, 0.510, 0.650, 0.997, 1.224]
    b = [0.807, 1.047, 0.709, 0.952, 0.926, 0.336, 0.782, 1.643, 0.419, 2.161]
    found = compare_samples([[x] for x in a], [[x] for x in b], in_turns=True)
    assert found.low is not None
    assert found.low > 1 + found.threshold
    assert found.decision == "undecided"
    assert found.why == ("the interval exceeds the threshold, but p is 0.68, not below 0.05")
    far = compare_samples([[1.0] * 10], [[1.0] * 7 + [3.0] * 3], in_turns=False)
    assert far.decision not in ("higher", "lower")
    assert compare_samples([[1.0] * 10], [[2.0] * 10], in_turns=False).why == ""


def test_processes_are_the_units_where_there_are_enough() -> None:
    random = np.random.default_rng(5)
    a = [random.normal(level, 0.0001, 50) for level in random.normal(1, 0.05, 8)]
    b = [random.normal(level, 0.0001, 50) for level in random.normal(1, 0.05, 8)]
    found = compare_samples(a, b, in_turns=False)
    assert sure(found.high) / sure(found.low) > 1.02
    assert found.decision == "undecided"


def test_turns_of_different_lengths_are_compared() -> None:
    a = [[1.0, 1.01], [1.0], [1.01, 1.0, 1.02]] * 4
    b = [[1.1], [1.11, 1.1], [1.12]] * 4
    assert compare_samples(a, b, in_turns=True).decision == "higher"


@pytest.mark.parametrize("blocks", [[], [[]], [[0.0, 1.0]]])
def test_nothing_to_compare_is_an_error(blocks: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="needs samples"):
        compare_samples(blocks, [[1.0]], in_turns=False)


def test_a_turn_without_its_other_half_is_an_error() -> None:
    with pytest.raises(ValueError, match="each turn needs both"):
        compare_samples([[1.0], [1.0]], [[1.0]], in_turns=True)


# --- alarms on recorded samples ---------------------------------------------------------------------------


def test_few_identical_pairs_of_recorded_steps_raise_an_alarm() -> None:
    """Four hundred pairs of resampled runs, half from runs that were disturbed or vary by more than 1 %."""
    everything = recorded("step_h200", fewest=10)
    noisy = [samples for samples, disturbed in everything if disturbed or np.std(samples) > 0.01 * np.mean(samples)]
    assert len(noisy) > 20
    random = np.random.default_rng(0)
    alarms = 0
    for pair in range(400):
        pool = noisy if pair % 2 else [samples for samples, _ in everything]
        samples = pool[random.integers(len(pool))]
        count, length = (30, 1) if pair % 3 else (10, 3)
        a, b = (resampled(samples, count, length, random) for _ in range(2))
        if pair % 4 < 2:
            found = compare_samples(a[:, None], b[:, None], in_turns=True)
        else:
            found = compare_samples([a], [b], in_turns=False, threshold=0.01)
        alarms += found.decision in ("higher", "lower")
    assert alarms <= 4


def test_a_slowdown_of_three_per_cent_is_found_with_thirty_steps_a_side_in_turns() -> None:
    """On a host that drifts by 10 %, without disturbed runs, which may be undecided."""
    quiet = [samples for samples, disturbed in recorded("step_h200", fewest=10) if not disturbed]
    random = np.random.default_rng(0)
    drift = 1 + 0.1 * np.sin(np.linspace(0, 6, 30))
    found = 0
    for _ in range(200):
        samples = quiet[random.integers(len(quiet))]
        a, b = (drift * resampled(samples, 30, 3, random) for _ in range(2))
        found += compare_samples(a[:, None], 1.03 * b[:, None], in_turns=True).decision == "higher"
    assert found >= 190


def test_what_starts_differ_by_widens_the_interval_and_vetoes_nothing() -> None:
    a, b = [1.0, 1.01] * 6, [0.4, 0.404] * 6
    near = compare_lists([a], [b], in_turns=False)
    far = compare_lists([a], [b], in_turns=False, margin=0.6)
    assert near.low is not None
    assert far.low is not None
    assert far.low < near.low
    assert far.decision == near.decision == "lower"
    assert compare_lists([a], [[1.5 * sample for sample in a]], in_turns=False, margin=0.6).decision == "undecided"
