"""Ratios of the times of two runs, with a decision if they differ."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median, stdev

from steplab import stats
from steplab.comparison.samples import by_interval, compare_samples
from steplab.records.comparison import Ratio
from steplab.records.disturbances import disturbances
from steplab.records.run import Run


def step_ratio(
    a: Run, b: Run, *, threshold: float | None = None, tokens_ratio: float = 1.0, num_decided: int = 1
) -> Ratio | None:
    """Ratio of step times, `b` over `a`, for equal numbers of tokens; None if a run has no steps or they did not
    alternate.

    `tokens_ratio`: tokens per step of `b` over `a`. `num_decided`: as in `compare_samples`.
    """
    of_a, of_b = _steps_s(a), tuple(sample / tokens_ratio for sample in _steps_s(b))
    if not of_a or not of_b or not took_turns(a, b):
        return None
    return ratio_in_turns(a, b, of_a, of_b, threshold=threshold, num_decided=num_decided)


def took_turns(a: Run, b: Run) -> bool:
    return a.turns is not None and b.turns is not None and a.turns.session == b.turns.session and a.id != b.id


def ratio_in_turns(
    a: Run, b: Run, of_a: Sequence[float], of_b: Sequence[float], *, threshold: float | None, num_decided: int
) -> Ratio | None:
    """Ratio of samples of two alternating runs, one per step; None without neighbouring turns.

    Of the run that began first, turns count only from just before the other's first turn to just after its last.
    """
    assert a.turns is not None
    assert b.turns is not None
    placed_a, placed_b = a.turns.blocks_of(tuple(of_a)), b.turns.blocks_of(tuple(of_b))
    if not placed_a or not placed_b:
        return None
    if placed_a[0][0] < placed_b[0][0]:
        placed_a = _beside(placed_a, placed_b)
    else:
        placed_b = _beside(placed_b, placed_a)
    sides = [[samples for _, samples in placed] for placed in (placed_a, placed_b)]
    in_turns = not (a.turns.alternating or b.turns.alternating)
    if in_turns:
        both = min(map(len, sides))
        sides = [side[:both] for side in sides]
    else:  # turns in separate processes are too few, so they are pooled
        sides = [[tuple(itertools.chain.from_iterable(side))] for side in sides]
    if not sides[0]:
        return None
    return compare_samples(*sides, in_turns=in_turns, threshold=threshold, num_decided=num_decided)


def chained(ratios: Sequence[Ratio]) -> Ratio:
    """Ratio of the last step to the first, from ratios of consecutive steps.

    Each ratio has its own turns, so errors are independent: logarithmic half widths add as the root of the sum of
    squares, per side. The medians are the first step's in the first ratio and the last step's in the last.
    """
    ratio = math.prod(each.ratio for each in ratios)
    below = [math.log(each.ratio / each.low) for each in ratios if each.low]
    above = [math.log(each.high / each.ratio) for each in ratios if each.high]
    known = len(below) == len(above) == len(ratios)
    low, high = (ratio / math.exp(math.hypot(*below)), ratio * math.exp(math.hypot(*above))) if known else (None, None)
    threshold = max(each.threshold for each in ratios)
    return Ratio(
        a=ratios[0].a,
        b=ratios[-1].b,
        num_a=ratios[0].num_a,
        num_b=ratios[-1].num_b,
        ratio=ratio,
        low=low,
        high=high,
        p=ratios[0].p if len(ratios) == 1 else None,
        threshold=threshold,
        decision=by_interval(low, high, threshold),
    )


def over_starts(each: Sequence[Sequence[Ratio | None]]) -> tuple[Ratio | None, ...]:
    """Combine the ratios of several starts, step by step; None for a step without a ratio.

    `each`: for each start, a list of ratios, one per compared step.
    """
    sides = ([ratio for ratio in side if ratio] for side in zip(*each, strict=True))
    return tuple(of_starts(found) if found else None for found in sides)


def of_starts(ratios: Sequence[Ratio]) -> Ratio:
    """Ratio over several starts of both sides.

    Its logarithm is the mean of the starts' logarithms. Its half width is the larger of two: the starts' half widths,
    combined, and that of Student's t over the starts, because processes differ more than turns within one.
    """
    if len(ratios) == 1:
        return ratios[0]
    logs = [math.log(each.ratio) for each in ratios]
    between = _STUDENT[min(len(ratios), len(_STUDENT) + 1)] * stdev(logs) / math.sqrt(len(ratios))
    whole = chained(ratios)
    within = [math.log(end / whole.ratio) / len(ratios) for end in (whole.low, whole.high) if end]
    ratio, low, high = math.exp(fmean(logs)), None, None
    if within:
        low, high = ratio * math.exp(min(within[0], -between)), ratio * math.exp(max(within[-1], between))
    return replace(
        whole,
        a=median(each.a for each in ratios),
        b=median(each.b for each in ratios),
        num_a=sum(each.num_a for each in ratios),
        num_b=sum(each.num_b for each in ratios),
        ratio=ratio,
        low=low,
        high=high,
        decision=by_interval(low, high, whole.threshold),
    )


_STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""97.5th percentile of Student's t by number of starts (degrees of freedom plus one)."""

_Placed = tuple[tuple[int, tuple[float, ...]], ...]


def _beside(earlier: _Placed, later: _Placed) -> _Placed:
    first, last = later[0][0], later[-1][0]
    start = max(place for place, _ in earlier if place < first)
    end = min((place for place, _ in earlier if place > last), default=last)
    return tuple((place, samples) for place, samples in earlier if start <= place <= end)


def _steps_s(run: Run) -> tuple[float, ...]:
    return () if run.failure else run.samples_s


_UNSTEADY = 0.18
_OTHER_HOST = 0.61
_OWN_SPREAD = 1.6
_KNOWN = {
    "unsteady": _UNSTEADY,
    "slowed clock": _OTHER_HOST,
    "may wait for host": _OTHER_HOST,
    "shared GPU": _OTHER_HOST,
    "outliers": _OTHER_HOST,
}
"""Largest logarithmic difference between medians of two starts of the same step, by disturbance.

From this repository's records of GPUs (benchmarks/compare_alarms.py lists them). On a shared CPU it is at least
`_OWN_SPREAD` times the logarithm of the 90th over the 10th percentile of the run's steps, the most among 120 pairs of
starts on an overloaded CPU.
"""


def start_margin(runs: Sequence[Run]) -> float:
    """Largest expected difference between the logarithms of median step times of two starts on these machines. 0 for
    undisturbed ones, whose starts differ by less than the default threshold."""
    return max((_margin(run) for run in runs), default=0.0)


def judged(a: Run, b: Run) -> Ratio | None:
    """Ratio of step times, `b` over `a`, with the decision; None if a run has no steps."""
    if took_turns(a, b) and (ratio := step_ratio(a, b)):
        return ratio
    if not a.samples_s or not b.samples_s:
        return None
    sides = ([run.samples_s] for run in (a, b))
    return compare_samples(*sides, in_turns=False, margin=start_margin((a, b)))


def _margin(run: Run) -> float:
    words = [disturbance.word for disturbance in disturbances(run)]
    known = max((_KNOWN.get(word, _OTHER_HOST) for word in words), default=0.0)
    on_gpu = run.environment is not None and run.environment.device.kind != "cpu"
    if not words or (on_gpu and all(word in _KNOWN for word in words)):
        return known
    low, high = (stats.percentile(run.samples_s, percent) for percent in (10, 90))
    return max(known, _OWN_SPREAD * math.log(high / low))
