"""The ratio of the times of two runs that took turns on one device."""

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

from steplab.comparison.samples import Blocks, by_interval, compare_samples
from steplab.records.comparison import Ratio
from steplab.records.run import Run


def step_ratio(
    a: Run, b: Run, *, threshold: float | None = None, tokens_ratio: float = 1.0, num_decided: int = 1
) -> Ratio | None:
    """The step time of `b` over that of `a`, on the tokens of a step of `a`.

    `tokens_ratio` is the tokens per step of `b` divided by those of `a`; `num_decided` is the number of ratios that are
    decided together, as of `compare_samples`. None: one of them has no steps, or they took
    no turns with each other.
    """
    of_a, of_b = _steps_s(a), tuple(sample / tokens_ratio for sample in _steps_s(b))
    if not of_a or not of_b or not took_turns(a, b):
        return None
    return ratio_in_turns(a, b, of_a, of_b, threshold=threshold, num_decided=num_decided)


def took_turns(a: Run, b: Run) -> bool:
    """Whether the steps of two runs alternated."""
    return a.turns is not None and b.turns is not None and a.turns.session == b.turns.session and a.id != b.id


def ratio_in_turns(
    a: Run, b: Run, of_a: Sequence[float], of_b: Sequence[float], *, threshold: float | None, num_decided: int = 1
) -> Ratio | None:
    """The ratio of samples of two runs that took turns, one of each step; None if no turns lie beside each other.

    A run that was there before the other may have had turns beside further runs; those are left out.
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
    blocks_a, blocks_b = ([samples for _, samples in placed] for placed in (placed_a, placed_b))
    alternating = bool(a.turns.alternating or b.turns.alternating)
    return _ratio(blocks_a, blocks_b, threshold, num_decided, alternating=alternating)


def chained(ratios: Sequence[Ratio]) -> Ratio:
    """The ratio of the last step to the first, from those of each step to the one before it.

    Its logarithm is the sum of theirs. Each was measured by turns of its own, so that their errors are independent, and
    half widths of intervals add up as the root of the sum of squares, on each side. Its medians are those of the first
    step in the first of the ratios and of the last step in the last.
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
    """The ratio of each side over all starts that have one; `each` has those of a start, side by side."""
    sides = ([ratio for ratio in side if ratio] for side in zip(*each, strict=True))
    return tuple(of_starts(found) if found else None for found in sides)


def of_starts(ratios: Sequence[Ratio]) -> Ratio:
    """The ratio over several starts of both sides, each with turns of its own.

    Its logarithm is the mean of theirs. The half width of its interval is the larger of what their intervals give, and
    of Student's for the spread between starts: processes of one step differ by more than turns within one.
    """
    if len(ratios) == 1:
        return ratios[0]
    logs = [math.log(each.ratio) for each in ratios]
    between = _STUDENT[min(len(ratios), len(_STUDENT) + 1)] * stdev(logs) / math.sqrt(len(ratios))
    whole = chained(ratios)
    within = [math.log(end / whole.ratio) / len(ratios) for end in (whole.low, whole.high) if end]
    threshold, ratio = max(each.threshold for each in ratios), math.exp(fmean(logs))
    low, high = (None, None)
    if within:
        low, high = ratio * math.exp(min(within[0], -between)), ratio * math.exp(max(within[-1], between))
    return Ratio(
        a=median(each.a for each in ratios),
        b=median(each.b for each in ratios),
        num_a=sum(each.num_a for each in ratios),
        num_b=sum(each.num_b for each in ratios),
        ratio=ratio,
        low=low,
        high=high,
        p=None,
        threshold=threshold,
        decision=by_interval(low, high, threshold),
    )


_STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""97.5th percentile of Student's t by the number of starts, one more than its degrees of freedom."""

_Placed = tuple[tuple[int, tuple[float, ...]], ...]
"""Samples of blocks, each with the place of its turn."""


def _beside(earlier: _Placed, later: _Placed) -> _Placed:
    """The blocks of the run that was there first that lie beside those of the other, which it precedes in a round."""
    first, last = later[0][0], later[-1][0]
    start = max(place for place, _ in earlier if place < first)
    end = min((place for place, _ in earlier if place > last), default=last)
    return tuple((place, samples) for place, samples in earlier if start <= place <= end)


def _ratio(
    blocks_a: Blocks, blocks_b: Blocks, threshold: float | None, num_decided: int, *, alternating: bool
) -> Ratio | None:
    """Turns are compared pair by pair, in their order; where each was a process of its own they are too few."""
    if alternating:
        together = [[sample for block in side for sample in block] for side in (blocks_a, blocks_b)]
        return compare_samples(together[:1], together[1:], in_turns=False, threshold=threshold, num_decided=num_decided)
    both = min(len(blocks_a), len(blocks_b))
    if not both:
        return None
    return compare_samples(
        blocks_a[:both], blocks_b[:both], in_turns=True, threshold=threshold, num_decided=num_decided
    )


def _steps_s(run: Run) -> tuple[float, ...]:
    return () if run.failure else run.samples_s
