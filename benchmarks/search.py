"""Finds the positive figures that predict measured times best."""

import math
from collections.abc import Callable

Params = dict[str, float]

_FIRST_STEP, _LAST_STEP = 0.3, 0.004
"""Relative size of the first and of the last changes that the search tries."""
STAY = 0.001
"""Error that a figure of a step must save to move by a factor of e from where its search starts, so that one which no
record shows stays, as the throttling of steps that keep their clock."""


def search(error: Callable[[Params], float], start: Params) -> Params:
    """The positive figures with the least error near `start`: one is changed at a time, by ever smaller factors."""
    best, least, step = dict(start), error(start), _FIRST_STEP
    while step > _LAST_STEP:
        improved = False
        for name in start:
            for factor in (math.exp(step), math.exp(-step)):
                tried = best | {name: best[name] * factor}
                if (found := error(tried)) < least - 1e-9:
                    best, least, improved = tried, found, True
        if not improved:
            step /= 2
    return best
