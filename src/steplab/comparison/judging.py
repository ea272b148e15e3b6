"""Judges if the steps of two runs differ, for pages, `compare` and `advise`."""

import math
from collections.abc import Sequence

from steplab import stats
from steplab.comparison.samples import compare_samples
from steplab.comparison.turns import step_ratio, took_turns
from steplab.records.comparison import Ratio
from steplab.records.disturbances import disturbances
from steplab.records.run import Run

_UNSTEADY = 0.18
_OTHER_HOST = 0.61
_OWN_SPREAD = 1.6
_KNOWN = {
    "unsteady": _UNSTEADY,
    "slowed clock": _OTHER_HOST,
    "waits for host": _OTHER_HOST,
    "shared GPU": _OTHER_HOST,
    "outliers": _OTHER_HOST,
}
"""Largest logarithmic difference between medians of two starts of the same step, by disturbance.

From this repository's records of GPUs (benchmarks/compare_alarms.py lists them). On a shared CPU it is at least
`_OWN_SPREAD` times the logarithm of the 90th over the 10th percentile of the run's steps, the most among 120 pairs of
starts on an overloaded CPU.
"""


def start_margin(runs: Sequence[Run]) -> float:
    """Expected logarithmic difference of another start on these machines; 0 for quiet ones: their starts differ by less
    than the default threshold.
    """
    return max((_margin(run) for run in runs), default=0.0)


def judged(a: Run, b: Run) -> Ratio | None:
    """Step time of `b` over `a`, with the decision; None if one has no steps."""
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
