"""Statistics of small sets of noisy timings: pure functions from raw samples to figures.

The median with an interval that assumes no distribution is the headline, because step times have a long right tail
(clock changes, other processes) that drags the mean. All functions take seconds and give seconds.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import median

CONFIDENCE = 0.95
"""Probability with which an interval holds the true median, at least."""
FEWEST_FOR_STEADY = 4
"""Number of samples from which `steady_from` says anything."""
_FAR = 2.0
"""Multiple of the median from which a sample is an outlier."""
_MANY = 0.25
"""Share of outliers from which the median is doubtful."""
_ROUNDING = 1e-9  # of probabilities by lgamma
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
    """Lower end of the 95 % interval of the median, or the smallest sample where there are too few for one."""
    high: float
    """Upper end of the 95 % interval of the median, or the largest sample where there are too few for one."""
    is_interval: bool
    """Whether `low` and `high` are a 95 % interval; it takes six samples. False: they are the range."""
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


def doubtful_outliers(samples: Sequence[float]) -> int:
    """The number of samples beyond twice the median, if they are a quarter of all, so that the median is doubtful; 0 if
    they are fewer."""
    bound = _FAR * median(samples)
    far = sum(sample > bound for sample in samples)
    return far if far >= _MANY * len(samples) else 0


def summarize(samples: Sequence[float]) -> Summary:
    """The statistics of one set of samples. Raises ValueError if it is empty."""
    import numpy as np

    if not samples:
        raise ValueError("no samples to summarize")
    values = np.asarray(samples, dtype=np.float64)
    interval = median_interval(samples)
    low, high = interval or (float(values.min()), float(values.max()))
    quartile_1, quartile_3 = np.quantile(values, [0.25, 0.75])
    return Summary(
        count=len(values),
        median=float(np.median(values)),
        low=low,
        high=high,
        is_interval=interval is not None,
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


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """The narrowest pair of samples, equally far from both ends, that holds the true median with this probability.

    None where not even the smallest and the largest do: for 95 % below six samples. Of n independent samples of any
    continuous distribution, the number below the median is binomial with p = 1/2, so the sample of rank d and that of
    rank n + 1 - d hold it with the probability of d to n - d heads in n throws (David and Nagaraja, Order Statistics,
    3rd edition, 7.1). The interval covers the variation within one process, not between processes or days.
    """
    n = len(samples)
    # From the middle outwards, so that no power of 1/2 underflows however many samples there are.
    rank = n // 2
    heads = math.exp(math.lgamma(n + 1) - math.lgamma(rank + 1) - math.lgamma(n - rank + 1) - n * math.log(2))
    covered = heads if n % 2 == 0 else 2 * heads
    while rank > 0 and covered < confidence - _ROUNDING:
        heads *= rank / (n - rank + 1)
        covered += 2 * heads
        rank -= 1
    if rank == 0:
        return None
    ordered = sorted(samples)
    return float(ordered[rank - 1]), float(ordered[n - rank])


def steady_from(samples: Sequence[float], tolerance: float = _STEADY_TOLERANCE) -> int | None:
    """Index of the first step from which the step time is steady, or None if it never settles.

    Steady from step k: step k itself, and the median of every three consecutive steps from k on, lie within
    `tolerance` of the median of the curve's second half. Medians of three, because one late hiccup is noise,
    not warm-up. Four samples are the least that say anything, and k must lie in the first half.
    """
    if len(samples) < FEWEST_FOR_STEADY:
        return None
    settled = median(samples[len(samples) // 2 :])

    def close(value: float) -> bool:
        return abs(value - settled) <= tolerance * settled

    triples = [close(median(samples[i : i + 3])) for i in range(len(samples) - 2)]
    for first in range(len(samples) // 2):
        if close(samples[first]) and all(triples[first:]):
            return first
    return None
