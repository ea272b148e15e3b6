"""Counts false alarms when comparing identical steps, and found slowdowns.

    python -m benchmarks.compare_alarms > benchmarks/results/compare_alarms_202611.md

Identical pairs are drawn with replacement, in runs of neighbours, from recorded step times (tests/golden and
benchmarks/results). For turns, neighbours alternate between A and B. B is then slowed. Differences between two
processes of one step are listed too: they set the thresholds of steplab.comparison.samples.
"""

import itertools
from functools import partial
from statistics import median

import numpy as np
from benchmarks.tables import GOLDEN, RESULTS, read

from steplab.comparison.samples import IN_TURNS, SEPARATE, compare_samples
from steplab.records.disturbances import disturbances
from steplab.records.rows import step_key
from steplab.records.run import Run

PAIRS = 1000


def runs() -> list[Run]:
    files = sorted(file for folder in (GOLDEN, RESULTS) for file in folder.glob("*.jsonl.*z"))
    return [run for file in files for run in read(file, Run) if len(run.samples_s) >= 10]


def drawn(pool: tuple[float, ...], count: int, length: int, random: np.random.Generator) -> list[float]:
    starts = random.integers(0, len(pool), -(-count // length))
    places = ((starts[:, None] + np.arange(length)) % len(pool)).ravel()[:count]
    return [pool[place] for place in places]


def turns(values: list[float], steps: int) -> list[list[float]]:
    return [values[first : first + steps] for first in range(0, len(values), steps)]


def alarms(pools: list[tuple[float, ...]], count: int, length: int, per_turn: int | None) -> tuple[float, float, float]:
    """Shares of identical pairs called different, and of pairs with B 3 % and 20 % slower that are found."""
    random = np.random.default_rng(0)
    wrong = small = large = 0
    for _ in range(PAIRS):
        pool = pools[random.integers(len(pools))]
        if per_turn is None:
            a, b = (drawn(pool, count, length, random) for _ in range(2))
        else:
            steps = turns(drawn(pool, 2 * count, 2 * length, random), per_turn)
            a, b = ([sample for turn in side for sample in turn] for side in (steps[::2], steps[1::2]))
        planted = (b, [1.03 * sample for sample in b], [1.2 * sample for sample in b])
        sides = [[each] if per_turn is None else turns(each, per_turn) for each in (a, *planted)]
        compared = partial(compare_samples, sides[0], in_turns=per_turn is not None, threshold=IN_TURNS)
        wrong += compared(sides[1]).decision in ("higher", "lower")
        small += compared(sides[2]).decision == "higher"
        large += compared(sides[3]).decision == "higher"
    return wrong / PAIRS, small / PAIRS, large / PAIRS


def between_processes(all_runs: list[Run], *, disturbed: bool) -> list[float]:
    """Differences between medians of two processes of one step, on one device and torch version."""
    alike: dict[tuple[object, ...], list[Run]] = {}
    for run in all_runs:
        if run.spec and run.environment:
            key = (*step_key(run.spec).values(), run.device_name, run.environment.torch)
            alike.setdefault(key, []).append(run)
    pairs = [pair for some in alike.values() for pair in itertools.combinations(some, 2)]
    chosen = [pair for pair in pairs if any(map(disturbances, pair)) == disturbed]
    medians = [[median(run.samples_s) for run in pair] for pair in chosen]
    return sorted(max(pair) / min(pair) - 1 for pair in medians)


def main() -> None:
    every = runs()
    quiet = [run.samples_s for run in every if not disturbances(run)]
    disturbed = [run.samples_s for run in every if disturbances(run)]
    print("# False alarms of comparisons\n")
    print("Made by `python -m benchmarks.compare_alarms`.\n")
    print(f"{PAIRS} identical pairs each, from {len(quiet)} quiet and {len(disturbed)} disturbed recorded runs, at a")
    print(f"threshold of {IN_TURNS:.0%}. Found: B made 3 % or 20 % slower.\n")
    print("| runs | samples a side | drawn in runs of | compared | false alarms | 3 % found | 20 % found |")
    print("|---|--:|--:|---|--:|--:|--:|")
    of_gpus = [run.samples_s for run in every if disturbances(run) and "NVIDIA" in (run.device_name or "")]
    for name, pools in (("quiet", quiet), ("disturbed", disturbed), ("disturbed, of GPUs", of_gpus)):
        for count, length, per_turn in (
            (10, 1, None),
            (30, 1, None),
            (30, 4, None),
            (30, 1, 1),
            (30, 4, 1),
            (30, 3, 3),
        ):
            how = "two processes" if per_turn is None else f"turns of {per_turn}"
            wrong, small, large = alarms(pools, count, length, per_turn)
            print(f"| {name} | {count} | {length} | {how} | {wrong:.1%} | {small:.1%} | {large:.1%} |", flush=True)
    print("\n## Two processes of the same step\n")
    print("| runs | pairs | median difference | 90th percentile | largest |")
    print("|---|--:|--:|--:|--:|")
    for name, is_disturbed in (("quiet", False), ("one disturbed", True)):
        apart = between_processes([run for run in every if run.device_name == "NVIDIA H200"], disturbed=is_disturbed)
        ninth = np.percentile(apart, 90)
        print(f"| H200, {name} | {len(apart)} | {median(apart):.1%} | {ninth:.1%} | {max(apart):.1%} |")
    noisy = between_processes([run for run in every if run.name == "identical"], disturbed=True)
    print(
        f"| overloaded CPU | {len(noisy)} | {median(noisy):.0%} | {np.percentile(noisy, 90):.0%} | {max(noisy):.0%} |"
    )
    print(
        f"\nThe threshold for one process a side is {SEPARATE:.0%}. The interval of a disturbed run is as wide as such"
    )
    print("starts differ (comparison.turns).")


if __name__ == "__main__":
    main()
