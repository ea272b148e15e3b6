"""Reasons to doubt a run's step time."""

from collections.abc import Iterator
from dataclasses import dataclass

from steplab import stats
from steplab.records.environment import Environment
from steplab.records.run import Run
from steplab.records.timing import HARDLY_AHEAD, curve, waits_for_host
from steplab.units import counted, format_limit, format_time

_NOTICEABLE = 0.1
"""Smallest share of the processors that other processes must use to make the machine busy."""
_CROWDED = 1.5
"""Load average per processor above which the machine is busy, if `other_cpus` is unknown."""
_SUSPENDED_S = 0.1
"""Shortest suspension in seconds that counts; clock readings may differ by less."""
_SLOWDOWNS = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake")
"""NVML's reasons for a lower clock that point to poor cooling or power supply; the power limit is no such reason."""

WAITS, BUSY = "may wait for host", "busy machine"
"""WAITS: the device may wait for the host, which a quiet machine would not change."""

MEANINGS = {
    "outliers": "many steps took over twice the median",
    "unsteady": "the step time did not settle",
    WAITS: "the GPU may wait for Python",
}
"""Legend of those words in the column `warning` that do not explain themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    word: str
    text: str


def disturbances(run: Run) -> tuple[Disturbance, ...]:
    """Reasons to doubt a run's step time; empty without timing.

    The reasons: a quarter of the steps take over twice the median; times do not settle within 5 %; the device waits for
    the host; others use CPU or GPU; heat or power lowers the clock; the machine was suspended.
    """
    return tuple(_found(run))


def _found(run: Run) -> Iterator[Disturbance]:
    timing, environment = run.timing, run.environment
    step = timing.phase("step") if timing else None
    if timing is None or step is None or not step.best_s:
        return
    if far := stats.doubtful_outliers(step.best_s):
        text = f"{far} of {counted(len(step.best_s), 'step')} took more than twice the median."
        yield Disturbance(word="outliers", text=text)
    if never_settles(run):
        yield Disturbance(word="unsteady", text=f"The step time did not settle in {len(curve(timing))} steps.")
    if waits_for_host(timing.back_to_back):
        share = format_limit(HARDLY_AHEAD)
        text = (
            f"The GPU may wait for Python, whose launches are less than {share} of a step ahead: CPU speed may matter."
        )
        yield Disturbance(word=WAITS, text=text)
    if environment is None:
        return
    if busy := busy_machine(environment, num_processes=max(len(run.ranks), 1)):
        yield busy
    if others := environment.device.other_processes:
        who = "One other process" if others == 1 else f"{others} other processes"
        computed = "if it computed there, all times are longer, and steady all the same."
        yield Disturbance(word="shared GPU", text=f"{who} had the GPU open during the measurement; {computed}")
    if slowed := [reason for reason in environment.device.clock_limits or () if reason in _SLOWDOWNS]:
        yield Disturbance(word="slowed clock", text=f"The GPU ran below its clock: {', '.join(slowed)}.")
    if (suspended_s := environment.suspended_s or 0.0) >= _SUSPENDED_S:
        text = f"The machine was suspended for {format_time(suspended_s)} during the measurement."
        yield Disturbance(word="suspended", text=text)


def never_settles(run: Run) -> bool:
    samples = curve(run.timing) if run.timing else ()
    return len(samples) >= stats.FEWEST_FOR_STEADY and stats.steady_from(samples) is None


def disturbance_words(run: Run) -> str | None:
    return ", ".join(disturbance.word for disturbance in disturbances(run)) or None


def busy_machine(environment: Environment, num_processes: int = 1) -> Disturbance | None:
    threads = environment.device.threads or 1
    others, cpus = environment.other_cpus, environment.num_cpus
    if others is not None:
        if others < _NOTICEABLE * cpus or others + threads <= cpus:
            return None
        used = f"Other processes kept {others:.1f} of {counted(cpus, 'processor')} busy during the measurement."
        return Disturbance(word=BUSY, text=used)
    load = environment.load_average
    wanted = max(cpus, threads * num_processes)
    if load is None or load <= _CROWDED * wanted:
        return None
    text = f"{load:.1f} processes were runnable on {counted(cpus, 'processor')} in the minute before measuring."
    return Disturbance(word=BUSY, text=text)
