"""Figures that several renderers show, computed from a run's raw samples; no presentation beyond words."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

from steplab import stats
from steplab.records.run import Run
from steplab.records.timing import Timing, curve

T = TypeVar("T")

WARMUP_COUNTS = (0, 1, 2, 5)
"""Numbers of warm-up steps whose effect is shown."""

_FEWEST = 4  # steps from which stats.steady_from says anything

PARTS = ("forward", "backward", "optimizer")
"""Parts of a built-in step, in the order they run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupEffect:
    """What the figures would have been had only `count` steps been left out."""

    count: int
    """Warm-up steps left out."""
    mean_s: float | None
    """Mean of the next measured-count steps; None where the curve is too short to say."""
    median_s: float | None
    """Their median."""


def warmup_study(timing: Timing, counts: Sequence[int] = WARMUP_COUNTS) -> list[WarmupEffect]:
    """Mean and median of as many steps as were measured, from the curve's step k on, for each k of `counts`.

    One recorded curve stands for a run with each number of warm-up steps: the first steps of a process are
    the same steps, however many of them are counted.
    """
    samples, step = curve(timing), timing.phase("step")
    steps = len(step.best_s) if step else 0
    effects = []
    for count in counts:
        window = samples[count : count + steps]
        complete = steps > 0 and len(window) == steps
        effects.append(
            WarmupEffect(
                count=count,
                mean_s=fmean(window) if complete else None,
                median_s=median(window) if complete else None,
            )
        )
    return effects


def steady_words(samples: Sequence[float]) -> str:
    """When the step time settled, counting steps from 1: 'steady from step 3 of 15'."""
    if len(samples) < _FEWEST:
        return f"too few steps to say when it is steady ({len(samples)}; {_FEWEST} are the least)"
    first = stats.steady_from(samples)
    if first is None:
        return f"not steady in {len(samples)} steps"
    return f"steady from step {first + 1} of {len(samples)}"


def never_steady(run: Run) -> bool:
    """Whether its step times did not settle, in steps enough to say so."""
    samples = curve(run.timing) if run.timing else ()
    return len(samples) >= _FEWEST and stats.steady_from(samples) is None


def phase_names(run: Run) -> list[str]:
    """Parts of the run's step that were timed, in the order they run; a user's own as they were recorded."""
    timing = run.timing
    timed = [samples.phase for samples in timing.back_to_back if samples.best_s] if timing else []
    parts = [name for name in timed if name != "step"]
    return [name for name in PARTS if name in parts] if set(parts) <= set(PARTS) else parts


def step_samples(run: Run) -> tuple[float, ...]:
    """The measured samples of the whole step; none for a run without a timing."""
    samples = run.timing.phase("step") if run.timing else None
    return samples.best_s if samples else ()


def step_median(run: Run) -> float | None:
    """Median step time of a run, None for one that has none."""
    return phase_median(run, "step")


def phase_median(run: Run, phase: str) -> float | None:
    """Median back-to-back time of one phase."""
    samples = run.timing.phase(phase) if run.timing else None
    return median(samples.best_s) if samples and samples.best_s else None


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
