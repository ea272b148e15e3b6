"""A run's figures in comparable form (records.measured)."""

from collections.abc import Iterator

from steplab.records.measured import Group, MeasuredCell, MeasuredFigure, of_phase
from steplab.records.profile import CATEGORIES
from steplab.records.rows import Scalar, run_row, step_key
from steplab.records.run import Run
from steplab.specs.step import describe


def run_cells(run: Run) -> tuple[MeasuredCell, ...]:
    """The run as its single cell."""
    spec = run.spec
    cell = MeasuredCell(
        key=step_key(spec) if spec else {"tokens_per_step": run.tokens_per_step},
        label=describe(spec) if spec else run.name,
        figures=() if run.failure else tuple(_figures(run)),
        failure=run.failure.message if run.failure else None,
    )
    return (cell,)


def _figures(run: Run) -> Iterator[MeasuredFigure]:
    row = run_row(run)
    yield from _times(run, row)
    for name, key in (("peak allocated", "peak_allocated_bytes"), ("peak reserved", "peak_reserved_bytes")):
        if value := row[key]:
            decides = key == "peak_allocated_bytes" and run.memory is not None
            yield _single(name, "memory", "bytes", float(value), decides=decides)
    if run.memory_profile:
        for category, held in run.memory_profile.at_peak.items():
            yield _single(category.replace("_", " "), "category", "bytes", float(held))
    yield from _profiled(run)


def _times(run: Run, row: dict[str, Scalar]) -> Iterator[MeasuredFigure]:
    """Step time, rates from it, phases, and compile time."""
    if not run.timing:
        return
    for phase in run.timing.back_to_back:
        if not phase.best_s or not all(phase.best_s):
            continue
        yield of_phase(phase)
        whole = phase.phase == "step"
        if whole and run.tokens_per_step:
            rates = tuple(run.tokens_per_step / step_s for step_s in phase.best_s)
            yield MeasuredFigure(name="tokens per second", group="speed", unit="tokens/s", samples=rates)
        for used in run.utilizations if whole else ():
            if used.peak_flops_per_s:
                peak = used.peak_flops_per_s * used.num_devices
                shares = tuple(used.flops / (step_s * peak) for step_s in phase.best_s)
                yield MeasuredFigure(name=used.label, group="speed", unit="share", samples=shares)
    if isinstance(compile_s := row["compile_s"], float) and compile_s > 0:
        yield _single("compile time", "time", "s", compile_s)


def _profiled(run: Run) -> Iterator[MeasuredFigure]:
    """Device time per profiled step by kernel category, and communication."""
    profile = run.profile
    if profile is None:
        return
    steps = profile.num_steps
    for category in CATEGORIES:
        if total_s := profile.category_s(category):
            yield _single(category, "kernels", "s", total_s / steps)
    if sent := profile.communication:
        yield _single("communication", "communication", "s", sent.total_s / steps)
        yield _single("exposed communication", "communication", "s", sent.exposed_s / steps)


def _single(name: str, group: Group, unit: str, value: float, *, decides: bool = False) -> MeasuredFigure:
    return MeasuredFigure(name=name, group=group, unit=unit, samples=(value,), decides=decides)
