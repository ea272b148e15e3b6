"""Searches the positive figures that best predict measured times."""

import math
from collections.abc import Callable

Params = dict[str, float]

_FIRST_STEP, _LAST_STEP = 0.3, 0.004
"""Relative size of the search's first and last changes."""
STAY = 0.001
"""Error saving that justifies moving a figure by a factor of e from its start, so that figures without evidence stay,
such as throttling of steps at full clock.
"""


def search(error: Callable[[Params], float], start: Params) -> Params:
    """Positive figures with the least error near `start`: coordinate changes by shrinking factors."""
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
