"""Statistics of small sets of noisy timings: pure functions from raw samples.

Results are medians with distribution-free intervals: step times have a long right tail (clocks, other processes) that
drags the mean. All times are seconds.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import median

CONFIDENCE = 0.95
"""Least probability that an interval contains the true median."""
FEWEST_FOR_STEADY = 4
"""Below this many samples `steady_from` returns None."""
_FAR = 2.0
"""A sample above this multiple of the median is an outlier."""
_MANY = 0.25
"""From this share of outliers on, the median is doubtful."""
_ROUNDING = 1e-9  # of probabilities by lgamma
_FEWEST_FOR_DRIFT = 9
_STEADY_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Statistics in the unit of the samples."""

    count: int
    median: float
    low: float
    """Lower end of the median's 95 % interval; without one, the smallest sample."""
    high: float
    """Upper end of the median's 95 % interval; without one, the largest sample."""
    is_interval: bool
    """True if `low` and `high` are a 95 % interval, which takes six samples; else they are the range."""
    mean: float
    stdev: float | None
    """Sample standard deviation (n - 1); None for one sample."""
    quartile_1: float
    """25th percentile, linear interpolation."""
    quartile_3: float
    """75th percentile, linear interpolation."""
    minimum: float
    maximum: float


def medians_of_thirds(samples: Sequence[float]) -> tuple[float, float, float]:
    """Medians of the first, middle and last third, for at least three samples."""
    third = len(samples) // 3
    return median(samples[:third]), median(samples[third:-third]), median(samples[-third:])


def drift(samples: Sequence[float]) -> float:
    """Median of all samples divided by the smallest of the thirds' medians; 1 for fewer than nine samples.

    A disturbance that began or ended during the measurement raises it.
    """
    return median(samples) / min(medians_of_thirds(samples)) if len(samples) >= _FEWEST_FOR_DRIFT else 1.0


def doubtful_outliers(samples: Sequence[float]) -> int:
    """Number of samples beyond twice the median if they are at least a quarter, which makes the median doubtful; else
    0.
    """
    bound = _FAR * median(samples)
    far = sum(sample > bound for sample in samples)
    return far if far >= _MANY * len(samples) else 0


def summarize(samples: Sequence[float]) -> Summary:
    """Raises ValueError without samples."""
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
    """Value that `percent` per cent of the samples do not exceed, linearly interpolated."""
    import numpy as np

    return float(np.percentile(np.asarray(samples, dtype=np.float64), percent))


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Narrowest symmetric pair of samples that encloses the true median with this probability.

    None if even the extremes do not, as below six samples for 95 %. With n independent samples of a continuous
    distribution, the number below the median is binomial with p = 1/2. So ranks d and n + 1 - d enclose it with the
    probability of d to n - d heads in n throws (David and Nagaraja, Order Statistics, 3rd edition, 7.1). Variation
    between processes or days is not covered.
    """
    n = len(samples)
    # From the middle outwards, so powers of 1/2 never underflow.
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
    """Index of the first step with a steady step time; None if it never settles, or for fewer than four samples.

    Steady means within `tolerance`, a share, of the second half's median. Step k, in the first half, must be so, and
    every median of three consecutive steps from k on, which ignores single hiccups.
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
