"""Reasons to doubt a run's step time: steps that differ too much, and a busy machine."""

from dataclasses import dataclass

from steplab import stats
from steplab.records.environment import Environment
from steplab.records.run import Run
from steplab.records.timing import HARDLY_AHEAD, curve, waits_for_host
from steplab.units import counted, format_limit, format_time

_NOTICEABLE = 0.1
"""Least share of processors for other processes to matter."""
_CROWDED = 1.5
"""Runnable processes per processor that mean overload, if nothing better is known."""
_SUSPENDED_S = 0.1
"""Least seconds of a suspension; readings of two clocks have shorter gaps."""
_SLOWDOWNS = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake")
"""Clock limits from failing cooling or power; the power limit belongs to the GPU."""

WAITS, BUSY = "waits for host", "busy machine"
"""Word for a step in which the device waits for the host; a quiet machine would not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """A reason to doubt a step time."""

    word: str
    """Short name, for a column or a label."""
    text: str


def disturbances(run: Run) -> tuple[Disturbance, ...]:
    """Reasons to doubt a run's step time; empty for a quiet run, and without a timing.

    Rules: a quarter of the steps take more than twice the median, or the time does not settle within 5 %. The device
    waits for the host. Other processes use the processors or the GPU. Heat or power supply lower the clock. The machine
    is suspended.
    """
    step = run.timing.phase("step") if run.timing else None
    if run.timing is None or step is None or not step.best_s:
        return ()
    found = [_outliers(step.best_s), _unsettled(run), _waiting(run)]
    if run.environment:
        environment = run.environment
        busy = busy_machine(environment, num_processes=max(len(run.ranks), 1))
        found += [busy, _shared(environment), _slowed(environment), _suspended(environment)]
    return tuple(disturbance for disturbance in found if disturbance)


def never_settles(run: Run) -> bool:
    samples = curve(run.timing) if run.timing else ()
    return len(samples) >= stats.FEWEST_FOR_STEADY and stats.steady_from(samples) is None


def disturbance_words(run: Run) -> str | None:
    """Short, for a column; None without any."""
    return ", ".join(disturbance.word for disturbance in disturbances(run)) or None


def _outliers(samples: tuple[float, ...]) -> Disturbance | None:
    far = stats.doubtful_outliers(samples)
    if not far:
        return None
    text = f"{far} of {counted(len(samples), 'step')} took more than twice the median."
    return Disturbance(word="outliers", text=text)


def _unsettled(run: Run) -> Disturbance | None:
    if not never_settles(run):
        return None
    assert run.timing is not None
    text = f"The step time did not settle in {len(curve(run.timing))} steps."
    return Disturbance(word="unsteady", text=text)


def _waiting(run: Run) -> Disturbance | None:
    assert run.timing is not None
    if not waits_for_host(run.timing.back_to_back):
        return None
    share = format_limit(HARDLY_AHEAD)
    text = f"The GPU waits for Python, which is less than {share} of a step ahead: CPU speed affects this time."
    return Disturbance(word=WAITS, text=text)


def busy_machine(environment: Environment, num_processes: int = 1) -> Disturbance | None:
    """True if other processes used processors that `num_processes` needed."""
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


def _shared(environment: Environment) -> Disturbance | None:
    others = environment.device.other_processes
    if not others:
        return None
    who = "One other process" if others == 1 else f"{others} other processes"
    text = f"{who} had the GPU open during the measurement; if it computed there, all times are longer, and steady all "
    return Disturbance(word="shared GPU", text=f"{text}the same.")


def _slowed(environment: Environment) -> Disturbance | None:
    reasons = [reason for reason in environment.device.clock_limits or () if reason in _SLOWDOWNS]
    if not reasons:
        return None
    return Disturbance(word="slowed clock", text=f"The GPU ran below its clock: {', '.join(reasons)}.")


def _suspended(environment: Environment) -> Disturbance | None:
    if (environment.suspended_s or 0.0) < _SUSPENDED_S:
        return None
    text = f"The machine was suspended for {format_time(environment.suspended_s or 0.0)} during the measurement."
    return Disturbance(word="suspended", text=text)
