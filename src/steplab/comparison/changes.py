"""Finds changes of level in a series of figures.

The method is E-divisive (Matteson and James, Journal of the American Statistical Association 109, 2014), as in MongoDB
(Daly et al., ICPE 2020) and Hunter (Fleming et al., ICPE 2023). It cuts the series at the largest energy distance
between both parts, if a permutation test rules out chance, and repeats in each part. Distances are between logarithms,
so changes are ratios.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from steplab.records.comparison import ChangePoint

SIGNIFICANT = 0.01
SHORTEST = 3
_PERMUTATIONS = 299
_ROUNDING = 1e-9  # of sums of distances, which differ by their order


def change_points(values: Sequence[float], *, threshold: float) -> tuple[ChangePoint, ...]:
    """Changes of level by more than `threshold`, a fraction, in order. All values must be positive.

    About ten values are needed: fewer have too few orders for a p below `SIGNIFICANT`.
    """
    found = sorted(_cuts(values, 0, len(values)))
    while found:
        bounds = [0, *(cut for cut, _ in found), len(values)]
        levels = [median(values[first:last]) for first, last in itertools.pairwise(bounds)]
        changes = [
            ChangePoint(index=cut, before=before, after=after, p=p)
            for (cut, p), (before, after) in zip(found, itertools.pairwise(levels), strict=True)
        ]
        small = [change for change in changes if abs(math.log(change.ratio)) <= math.log1p(threshold)]
        if not small:
            return tuple(changes)
        least = min(small, key=lambda change: abs(math.log(change.ratio)))
        found = [(cut, p) for cut, p in found if cut != least.index]
    return ()


def _cuts(values: Sequence[float], first: int, last: int) -> Iterator[tuple[int, float]]:
    import numpy as np

    num = last - first
    if num < 2 * SHORTEST:
        return
    logs = np.log(np.asarray(values[first:last], dtype=np.float64))
    distances = np.abs(logs[:, None] - logs[None, :])
    cut, clearest = _clearest_cut(distances)
    random = np.random.default_rng(0)  # reproducible
    orders = (random.permutation(num) for _ in range(_PERMUTATIONS))
    least = clearest * (1 - _ROUNDING)
    as_clear = sum(_clearest_cut(distances[np.ix_(order, order)])[1] >= least for order in orders)
    p = (as_clear + 1) / (_PERMUTATIONS + 1)
    if clearest <= 0 or p > SIGNIFICANT:
        return
    yield first + cut, p
    yield from _cuts(values, first, first + cut)
    yield from _cuts(values, first + cut, last)


def _clearest_cut(distances: Any) -> tuple[int, float]:
    import numpy as np

    num = len(distances)
    sums = np.zeros((num + 1, num + 1))
    sums[1:, 1:] = distances.cumsum(axis=0).cumsum(axis=1)
    cuts = np.arange(SHORTEST, num - SHORTEST + 1)
    left, right = cuts, num - cuts
    within_left = sums[cuts, cuts]
    between = sums[cuts, num] - within_left
    within_right = sums[num, num] - within_left - 2 * between
    # Matteson and James, equation 5; means within a part are over pairs of different values.
    energy = 2 * between / (left * right) - within_left / (left * (left - 1)) - within_right / (right * (right - 1))
    scaled = energy * left * right / num
    best = int(np.argmax(scaled))
    return int(cuts[best]), float(scaled[best])
