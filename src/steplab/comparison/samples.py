"""Decides if the samples of B are higher or lower than A's: pure functions on lists of numbers.

For two step functions that alternated on one machine, a few steps at a time:

    a = [[0.101, 0.102], [0.100, 0.101], ...]   # a list per turn of A, in order of time
    b = [[0.104, 0.105], [0.103, 0.104], ...]   # turn i of B is next to turn i of A
    ratio = compare_samples(a, b, in_turns=True)
    ratio.decision   # higher, lower, same, not higher or undecided
    ratio.exceeds    # True: a regression beyond ratio.threshold; None: undecided

For one process per side, pass `[samples]` and `in_turns=False`; for several processes, a list for each.

The bootstrap resamples units: turns; processes, if each side has `FEWEST`; else samples. It draws runs of neighbours,
because neighbouring steps are similar (circular block bootstrap, Politis and Romano, 1992). A run's length is the cube
root of the number of units (Hall, Horowitz and Jing, Biometrika 82, 1995). For turns, each sample is first divided by
the median of both sides around its turn; turns of A and B are drawn together, so common slowdowns cancel.

B is higher if the whole percentile interval lies above the threshold and the test of Mann and Whitney (1947) agrees.
Either criterion alone raises more false alarms: the bootstrap of a median of few samples is too narrow, and ranks also
detect differences too small to matter. benchmarks/compare_alarms.py counts alarms on recorded samples.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from steplab.records.comparison import Decision, Ratio
from steplab.stats import CONFIDENCE

Blocks = Sequence[Sequence[float]]
"""Samples in order of time: one list per turn or process."""

FEWEST = 6
"""Smallest number of units for an interval. With 6 turns p can be 2 / 2**6, which is below `ALPHA_IN_TURNS`."""
ALPHA, ALPHA_IN_TURNS = 0.01, 0.05
"""Significance levels for processes and for turns. Few turns allow no lower p; common slowdowns cancel in turns, so
their interval is the stricter criterion."""
IN_TURNS = 0.01
"""Default threshold for alternating samples, whose differences come from the code."""
SEPARATE = 0.05
"""Default threshold below `FEWEST` processes per side. Equal steps on quiet H200s differ by up to 5.0 % between two
processes, and by more than 0.4 % in half of the recorded pairs (benchmarks/compare_alarms.py)."""

_REPLICATES = 1000
_AT_ONCE = 2_000_000  # values resampled together, to bound memory
_MOST_FOR_EXACT = 30  # units of both sides; beyond, the normal approximation serves
_MOST_TURNS_FOR_EXACT = 12
_MOST_TIMES_MORE = 100
_ROUNDING = 1e-9  # of sums of mean ranks


def compare_samples(
    a: Blocks, b: Blocks, *, in_turns: bool, threshold: float | None = None, num_decided: int = 1, margin: float = 0.0
) -> Ratio:
    """Ratio of B's median to A's, with 95 % interval, test and decision.

    `in_turns`: blocks i of A and B ran next to each other. `threshold`: the smallest difference that matters, as a
    fraction; None: `IN_TURNS`, or `SEPARATE` if not in turns and below `FEWEST` processes a side. `num_decided`: number
    of ratios that share the probability of a false alarm. `margin`: largest difference to expect between the logarithms
    of the medians of two starts; where `SEPARATE` is the default, the interval extends at least so far on both sides.

    Raises ValueError for a side without samples, a sample that is not positive, or unpaired turns.
    """
    import numpy as np

    sides = [[np.asarray(block, dtype=np.float64) for block in side if len(block)] for side in (a, b)]
    if not all(sides) or not all((block > 0).all() for side in sides for block in side):
        raise ValueError("each side needs samples, all above zero")
    if in_turns and len(sides[0]) != len(sides[1]):
        raise ValueError(f"{len(sides[0])} turns of A and {len(sides[1])} of B; each turn needs both")
    separate = not in_turns and min(map(len, sides)) < FEWEST
    units = [np.concatenate(side)[:, None] if separate else _rows_of(side) for side in sides]
    alpha = (ALPHA_IN_TURNS if in_turns else ALPHA) / num_decided
    if threshold is None:
        threshold = SEPARATE if separate else IN_TURNS
    middles = [float(np.median(np.concatenate(side))) for side in sides]
    ratio = middles[1] / middles[0]
    if in_turns:
        units = _aligned(*units)
        ratio = float(np.nanmedian(units[1]) / np.nanmedian(units[0]))
    interval = _interval(*units, in_turns=in_turns) if min(map(len, units)) >= FEWEST else None
    p = None
    if interval and separate and margin:
        low, high = (max(abs(math.log(end / ratio)), margin) for end in interval)
        interval = ratio / math.exp(low), ratio * math.exp(high)
    if interval:
        p = mann_whitney_in_turns(*units) if in_turns else mann_whitney(*(np.nanmedian(unit, axis=1) for unit in units))
    decision, why = _decided(interval, p, threshold, alpha)
    return Ratio(
        a=middles[0],
        b=middles[1],
        num_a=sum(map(len, sides[0])),
        num_b=sum(map(len, sides[1])),
        ratio=ratio,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        p=p,
        threshold=threshold,
        decision=decision,
        more=_more(interval, threshold, min(map(len, units)), _fewest(alpha, in_turns=in_turns))
        if decision == "undecided" and not (separate and margin)
        else None,
        why=why,
    )


def compare_values(a: float, b: float, threshold: float | None) -> Ratio:
    """Ratio of exact values, such as bytes; its interval has no width. Raises ValueError unless both are positive."""
    if a <= 0 or b <= 0:
        raise ValueError("both values must be above zero")
    threshold = IN_TURNS if threshold is None else threshold
    ratio = b / a
    decision = by_interval(ratio, ratio, threshold)
    return Ratio(
        a=a, b=b, num_a=1, num_b=1, ratio=ratio, low=ratio, high=ratio, p=None, threshold=threshold, decision=decision
    )


def _rows_of(blocks: list[Any]) -> Any:
    import numpy as np

    rows = np.full((len(blocks), max(map(len, blocks))), np.nan)
    for row, block in zip(rows, blocks, strict=True):
        row[: len(block)] = block
    return rows


def _aligned(a: Any, b: Any) -> list[Any]:
    """Turns of both sides, each divided by the median of the turn and its two neighbours."""
    import numpy as np

    both = np.concatenate([a, b], axis=1)
    edge = np.full((1, both.shape[1]), np.nan)
    padded = np.concatenate([edge, both, edge])
    trend = np.nanmedian(np.concatenate([padded[:-2], both, padded[2:]], axis=1), axis=1, keepdims=True)
    return [a / trend, b / trend]


def _interval(a: Any, b: Any, *, in_turns: bool) -> tuple[float, float]:
    import numpy as np

    random = np.random.default_rng(0)  # reproducible
    ratios: list[Any] = []
    at_once = max(1, min(_REPLICATES, _AT_ONCE // max(a.size, b.size)))
    for first in range(0, _REPLICATES, at_once):
        count = min(at_once, _REPLICATES - first)
        rows_a = _rows(random, len(a), count)
        rows_b = rows_a if in_turns else _rows(random, len(b), count)
        ratios.append(_medians(b[rows_b]) / _medians(a[rows_a]))
    low, high = np.quantile(np.concatenate(ratios), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _rows(random: Any, num_units: int, count: int) -> Any:
    """Indices of resampled units, of shape (count, num_units), in circular runs of neighbours."""
    import numpy as np

    length = max(1, round(num_units ** (1 / 3)))
    starts = random.integers(0, num_units, (count, -(-num_units // length)))
    return ((starts[:, :, None] + np.arange(length)) % num_units).reshape(count, -1)[:, :num_units]


def _medians(resampled: Any) -> Any:
    import numpy as np

    flat = resampled.reshape(len(resampled), -1)
    return np.nanmedian(flat, axis=1) if np.isnan(flat).any() else np.median(flat, axis=1)


def _decided(
    interval: tuple[float, float] | None, p: float | None, threshold: float, alpha: float
) -> tuple[Decision, str]:
    """Decision, and the reason if it is weaker than the interval's alone."""
    if interval is None or p is None:
        return "undecided", ""
    found = by_interval(*interval, threshold)
    if found not in ("higher", "lower") or p < alpha:
        return found, ""
    why = f"the interval exceeds the threshold, but p is {p:.2g}, not below {alpha:.2g}"
    return "not higher" if found == "lower" else "undecided", why


def by_interval(low: float | None, high: float | None, threshold: float) -> Decision:
    if low is None or high is None:
        return "undecided"
    if 1 / (1 + threshold) <= low and high <= 1 + threshold:
        return "same"
    if low > 1 + threshold or high < 1 / (1 + threshold):
        return "higher" if low > 1 else "lower"
    return "not higher" if high <= 1 + threshold else "undecided"


def _fewest(alpha: float, *, in_turns: bool) -> int:
    num = FEWEST
    while (max(2 / 2**num, math.erfc(math.sqrt(num / 2))) if in_turns else 2 / math.comb(2 * num, num)) >= alpha:
        num += 1
    return num


def _more(interval: tuple[float, float] | None, threshold: float, num_units: int, fewest: int) -> int | None:
    """Further units per side for an interval as narrow as the threshold, at least `fewest` in all.

    The interval's width falls with the square root of the units. Only a ratio near the threshold then stays undecided.
    """
    if interval is None:
        return max(fewest - num_units, 1)
    times = (math.log(interval[1] / interval[0]) / math.log1p(threshold)) ** 2 if threshold else math.inf
    if times > _MOST_TIMES_MORE or (times <= 1 and num_units >= fewest):
        return None
    return max(math.ceil(num_units * times), fewest) - num_units


def mann_whitney(a: Any, b: Any) -> float:
    """Two-sided p of the Mann-Whitney test; ties get mean ranks.

    Exact up to 30 values, given the ties; beyond, the normal approximation with corrections for ties and continuity.
    Mann and Whitney, Annals of Mathematical Statistics 18, 1947.
    """
    import numpy as np

    ranks = _doubled_ranks(np.concatenate([a, b]))
    num_a, num = len(a), len(ranks)
    observed = int(ranks[:num_a].sum())
    if num <= _MOST_FOR_EXACT:
        return _tails(_sums(ranks)[num_a], observed)
    # The sum of `num_a` ranks drawn without replacement.
    mean = num_a * ranks.mean()
    variance = num_a * (num - num_a) / (num - 1) * ranks.var()
    return math.erfc(max(abs(observed - mean) - 1, 0) / math.sqrt(2 * variance)) if variance else 1.0


def mann_whitney_in_turns(a: Any, b: Any) -> float:
    """Two-sided p of the Mann-Whitney test, with samples exchanged only within turns; both of shape (turns, samples).

    Exact up to 12 turns, then approximately normal. An exchange flips the sign of a turn's difference of mean ranks
    (aligned ranks of Hodges and Lehmann, Annals of Mathematical Statistics 33, 1962).
    """
    import numpy as np

    values = np.concatenate([a, b], axis=1)
    ranks = np.full(values.shape, np.nan)
    ranks[~np.isnan(values)] = _doubled_ranks(values[~np.isnan(values)])
    differences = np.nanmean(ranks[:, a.shape[1] :], axis=1) - np.nanmean(ranks[:, : a.shape[1]], axis=1)
    observed, num = abs(differences.sum()), len(differences)
    variance, moved = (differences**2).sum(), differences - differences.mean()
    for lag in range(1, round(num ** (1 / 3)) + 1):
        variance += 2 * max(0.0, float(moved[lag:] @ moved[:-lag]))
    normal = math.erfc(observed / math.sqrt(2 * variance)) if variance else 1.0
    if num > _MOST_TURNS_FOR_EXACT:
        return normal
    signs = np.array(list(itertools.product((-1, 1), repeat=num)))
    return max(normal, float((np.abs(signs @ differences) >= observed * (1 - _ROUNDING)).mean()))


def _doubled_ranks(values: Any) -> Any:
    """Twice the ranks, which are integers even for ties."""
    import numpy as np

    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (2 * np.cumsum(counts) - counts + 1)[places]


def _sums(ranks: Any) -> Any:
    """Number of subsets of the ranks, by their size and sum: an array [size, sum]."""
    import numpy as np

    ways = np.zeros((len(ranks) + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    return ways


def _tails(ways: Any, observed: int) -> float:
    total = ways.sum()
    lower, upper = ways[: observed + 1].sum() / total, ways[observed:].sum() / total
    return float(min(1.0, 2 * min(lower, upper)))
