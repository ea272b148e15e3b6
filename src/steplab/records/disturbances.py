"""What makes the step time of a run doubtful: steps that differ too much, and a machine that did other work."""

from dataclasses import dataclass

from steplab import stats
from steplab.records.environment import Environment
from steplab.records.run import Run
from steplab.records.timing import HARDLY_AHEAD, curve, waits_for_host
from steplab.units import counted, format_limit, format_time

_NOTICEABLE = 0.1
"""Share of the machine's processors from which other processes matter."""
_CROWDED = 1.5
"""Runnable processes per processor from which a machine is overloaded, where nothing better is known."""
_SUSPENDED_S = 0.1
"""Seconds of suspension from which it was one; less is the time between the readings of two clocks."""
_SLOWDOWNS = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake")
"""Reasons of a lower clock that are faults of cooling or power supply; the power limit is part of the GPU."""

WAITS = "waits for host"
"""Word for a step in which the device waits for the host; a quiet machine would not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """One reason to doubt the step time of a run."""

    word: str
    """Short name, for a column or a label."""
    text: str
    """Whole sentence with the figures."""


def disturbances(run: Run) -> tuple[Disturbance, ...]:
    """Why the step time of a run is doubtful; empty for a steady run on a quiet machine, and for one without a timing.

    The rules: a quarter of the steps take more than twice the median; the step time does not settle within 5 %; the
    device waits for the host; other processes used the processors or the GPU; the GPU's clock was lowered by heat or
    by the power supply; the machine was suspended.
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
    """Whether the step time did not settle, in a curve long enough to tell."""
    samples = curve(run.timing) if run.timing else ()
    return len(samples) >= stats.FEWEST_FOR_STEADY and stats.steady_from(samples) is None


def disturbance_words(run: Run) -> str | None:
    """The short names of all disturbances of a run, for a column; None without any."""
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
    text = (
        f"The device waits for the host, which leads by less than {share} of the step, so the host's pace is timed too."
    )
    return Disturbance(word=WAITS, text=text)


def busy_machine(environment: Environment, num_processes: int = 1) -> Disturbance | None:
    """Whether other processes used processors that a measurement in `num_processes` processes needed."""
    threads = environment.device.threads or 1
    others, cpus = environment.other_cpus, environment.num_cpus
    if others is not None:
        if others < _NOTICEABLE * cpus or others + threads <= cpus:
            return None
        used = f"Other processes kept {others:.1f} of {counted(cpus, 'processor')} busy during the measurement."
        return Disturbance(word="busy machine", text=used)
    load = environment.load_average
    wanted = max(cpus, threads * num_processes)
    if load is None or load <= _CROWDED * wanted:
        return None
    text = f"{load:.1f} processes were runnable on {counted(cpus, 'processor')} in the minute before the measurement."
    return Disturbance(word="busy machine", text=text)


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
