"""Figures that several renderers show, computed from a run's raw samples; no presentation beyond words."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from steplab import stats
from steplab.records.run import Run, Utilization
from steplab.records.timing import Timing, curve

WARMUP_COUNTS = (0, 1, 2, 5)
"""Numbers of warm-up steps whose effect on the figures is shown."""

PARTS = ("forward", "backward", "pipeline", "gradient sync", "optimizer")
"""Parts of a built-in step, in the order they run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupEffect:
    """The figures as they would be with only `count` warm-up steps."""

    count: int
    """Warm-up steps left out."""
    mean_s: float | None
    """Mean of as many steps as were measured, after the first `count`; None where the curve is too short."""
    median_s: float | None
    """Their median."""


def warmup_study(timing: Timing) -> list[WarmupEffect]:
    """Mean and median of as many steps as were measured, from the curve's step k on, for each k of WARMUP_COUNTS.

    One recorded curve serves for every number of warm-up steps, because the first steps of a process are the same
    however many of them are counted.
    """
    samples, step = curve(timing), timing.phase("step")
    steps = len(step.best_s) if step else 0
    effects = []
    for count in WARMUP_COUNTS:
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
    """When the step time settled, with steps counted from 1: 'steady from step 3 of 15'."""
    if len(samples) < stats.FEWEST_FOR_STEADY:
        return f"too few steps to tell when it settles ({len(samples)}; at least {stats.FEWEST_FOR_STEADY} are needed)"
    first = stats.steady_from(samples)
    if first is None:
        return f"did not settle in {len(samples)} steps"
    return f"steady from step {first + 1} of {len(samples)}"


def steady_sentence(samples: Sequence[float]) -> str:
    """The same as a sentence."""
    words = steady_words(samples)
    if len(samples) < stats.FEWEST_FOR_STEADY:
        return f"There are {words}."
    return f"The step time {'is ' if words.startswith('steady') else ''}{words}."


def phase_names(run: Run) -> list[str]:
    """The timed parts of the run's step in the order they run, or, for a user's own loop, as they were recorded."""
    timing = run.timing
    timed = [samples.phase for samples in timing.back_to_back if samples.best_s] if timing else []
    parts = [name for name in timed if name != "step"]
    return [name for name in PARTS if name in parts] if set(parts) <= set(PARTS) else parts


def achieved_flops_per_s(used: Utilization) -> float | None:
    """FLOP/s of all devices together; None where the utilization is not known."""
    if used.value is None or used.peak_flops_per_s is None:
        return None
    return used.value * used.peak_flops_per_s * used.num_devices
