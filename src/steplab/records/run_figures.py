"""Figures of a run, each declared once with its value and format. Rows and table columns derive from them."""

from collections.abc import Callable
from functools import partial

from steplab.records.disturbances import disturbance_words
from steplab.records.figure import Figure
from steplab.records.run import Run
from steplab.records.timing import Energy
from steplab.specs.step_fields import Scalar


def _end_of_interval(number: int) -> Callable[[Run], float | None]:
    return lambda run: run.interval_s[number] if run.interval_s else None


def _compile_s(run: Run) -> float | None:
    first_s, step_s = run.timing.first_step_s if run.timing else None, run.median_s
    return first_s - step_s if first_s and step_s else None


def _tokens_per_s(run: Run) -> float | None:
    return run.tokens_per_step / run.median_s if run.tokens_per_step and run.median_s else None


def _energy(run: Run) -> Energy | None:
    return run.timing.energy if run.timing else None


def _tokens_per_j(run: Run) -> float | None:
    energy = _energy(run)
    return run.tokens_per_step / energy.per_step_j if run.tokens_per_step and energy else None


MFU, HFU = ("mfu", "causal"), ("hfu", "as_executed")


def _used(field: str, *kinds: tuple[str, str]) -> Callable[[Run], Scalar]:
    """Function that reads `field` from the first of these utilizations (kind, convention) that a run has."""

    def find(run: Run) -> Scalar:
        found = (run.utilization(*kind) for kind in kinds)
        return next((getattr(used, field) for used in found if used), None)

    return find


def _peak(field: str, of_profile: str) -> Callable[[Run], int | None]:
    """Function that reads a run's peak from `field` of PeakMemory, or of an imported snapshot from `of_profile`."""

    def find(run: Run) -> int | None:
        if run.peak:
            return int(getattr(run.peak, field))
        return getattr(run.memory_profile, of_profile, None) if run.memory is None else None

    return find


RUN_FIGURES: tuple[Figure[Run], ...] = (
    Figure(key="step_time_s", header="step", find=lambda run: run.median_s),
    Figure(key="step_time_low_s", find=_end_of_interval(0)),
    Figure(key="step_time_high_s", find=_end_of_interval(1)),
    Figure(key="warnings", header="warning", is_words=True, find=disturbance_words, rank=1, shared="warnings: {}"),
    Figure(key="forward_s", header="forward", find=partial(Run.phase_s, name="forward"), rank=5),
    Figure(key="backward_s", header="backward", find=partial(Run.phase_s, name="backward"), rank=5),
    Figure(key="pipeline_s", header="pipeline", find=partial(Run.phase_s, name="pipeline"), rank=5),
    Figure(key="gradient_sync_s", header="sync", find=partial(Run.phase_s, name="gradient sync"), rank=5),
    Figure(key="optimizer_s", header="opt. step", find=partial(Run.phase_s, name="optimizer"), rank=5),
    Figure(key="compile_s", header="compile time", find=_compile_s, rank=6),
    Figure(key="tokens_per_s", header="tokens/s", find=_tokens_per_s, rank=3),
    Figure(key="energy_per_step_j", find=lambda run: energy.per_step_j if (energy := _energy(run)) else None),
    Figure(key="tokens_per_j", header="tokens/J", find=_tokens_per_j, rank=6),
    Figure(key="mfu", header="MFU", find=_used("value", MFU), rank=1),
    Figure(key="mfu_convention", header="convention", is_words=True, find=_used("convention", MFU), rank=4),
    Figure(key="hfu", header="HFU", find=_used("value", HFU), rank=4),
    Figure(
        key="peak_flops_per_s",
        header="dense peak",
        find=_used("peak_flops_per_s", MFU, HFU),
        rank=10,
        shared="dense peak {}",
    ),
    Figure(
        key="peak_source",
        header="source of the peak",
        is_words=True,
        find=_used("peak_source", MFU, HFU),
        rank=11,
        shared="source of the peak: {}",
    ),
    Figure(key="peak_allocated_bytes", header="allocated", find=_peak("peak_allocated_bytes", "peak_bytes"), rank=2),
    Figure(key="peak_reserved_bytes", header="reserved", find=_peak("peak_reserved_bytes", "reserved_bytes"), rank=5),
    Figure(
        key="host_peak_bytes",
        header="host peak",
        find=lambda run: run.memory.host_peak_bytes if run.memory else None,
        rank=7,
    ),
    Figure(
        key="memory_source", is_words=True, find=lambda run: run.memory_profile.source if run.memory_profile else None
    ),
)
