"""Statistics of small sets of noisy timings: pure functions from raw samples to figures.

The median with a bootstrap interval is the headline, because step times have a long right tail (clock
changes, other processes) that drags the mean. All functions take seconds and give seconds.
"""

import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_RESAMPLES = 2000
_FEWEST_FOR_DRIFT = 9
_STEADY_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The statistics of one set of raw samples, in the samples' unit."""

    count: int
    """Number of samples."""
    median: float
    """Median, the headline figure."""
    low: float
    """Lower end of the 95 % bootstrap interval of the median."""
    high: float
    """Upper end of the 95 % bootstrap interval of the median."""
    mean: float
    """Arithmetic mean."""
    stdev: float | None
    """Sample standard deviation (n - 1); None for a single sample."""
    quartile_1: float
    """25th percentile, linear interpolation."""
    quartile_3: float
    """75th percentile, linear interpolation."""
    minimum: float
    """Smallest sample."""
    maximum: float
    """Largest sample."""


def medians_of_thirds(samples: Sequence[float]) -> tuple[float, float, float]:
    """Medians of the first, the middle and the last third of the samples, in the order they were taken.

    It takes at least three samples.
    """
    third = len(samples) // 3
    return median(samples[:third]), median(samples[third:-third]), median(samples[-third:])


def drift(samples: Sequence[float]) -> float:
    """The median divided by the smallest of the three thirds' medians, which shows a disturbance that began or ended.

    It is 1 for too few samples to tell a change from noise.
    """
    return median(samples) / min(medians_of_thirds(samples)) if len(samples) >= _FEWEST_FOR_DRIFT else 1.0


def summarize(samples: Sequence[float]) -> Summary:
    """The statistics of one set of samples. Raises ValueError if it is empty."""
    import numpy as np

    if not samples:
        raise ValueError("no samples to summarize")
    values = np.asarray(samples, dtype=np.float64)
    low, high = bootstrap_interval(values)
    quartile_1, quartile_3 = np.quantile(values, [0.25, 0.75])
    return Summary(
        count=len(values),
        median=float(np.median(values)),
        low=low,
        high=high,
        mean=float(values.mean()),
        stdev=float(values.std(ddof=1)) if len(values) > 1 else None,
        quartile_1=float(quartile_1),
        quartile_3=float(quartile_3),
        minimum=float(values.min()),
        maximum=float(values.max()),
    )


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value that `percent` per cent of the samples do not exceed, with linear interpolation between samples."""
    import numpy as np

    return float(np.percentile(np.asarray(samples, dtype=np.float64), percent))


def bootstrap_interval(samples: "Sequence[float] | np.ndarray", confidence: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the median (Efron and Tibshirani 1993, chapter 13).

    The resampling is seeded: the same samples always give the same interval, so that a stored record and
    its report agree wherever they are read.
    """
    import numpy as np

    values = np.asarray(samples, dtype=np.float64)
    rng = np.random.default_rng(0)
    resampled = values[rng.integers(0, len(values), size=(_RESAMPLES, len(values)))]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.median(resampled, axis=1), [tail, 1 - tail])
    return float(low), float(high)


def steady_from(samples: Sequence[float], tolerance: float = _STEADY_TOLERANCE) -> int | None:
    """Index of the first step from which the step time is steady, or None if it never settles.

    Steady from step k: step k itself, and the median of every three consecutive steps from k on, lie within
    `tolerance` of the median of the curve's second half. Medians of three, because one late hiccup is noise,
    not warm-up. Four samples are the least that say anything, and k must lie in the first half.
    """
    if len(samples) < 4:
        return None
    settled = median(samples[len(samples) // 2 :])

    def close(value: float) -> bool:
        return abs(value - settled) <= tolerance * settled

    triples = [close(median(samples[i : i + 3])) for i in range(len(samples) - 2)]
    for first in range(len(samples) // 2):
        if close(samples[first]) and all(triples[first:]):
            return first
    return None
