"""Flat rows of records, and the compared cells of runs. Names end in the unit; None is a missing value."""

from collections.abc import Callable, Iterator
from typing import Any

from steplab.records.figure import Figure, Group, MeasuredCell, MeasuredFigure, values
from steplab.records.profile import CATEGORIES, Profile
from steplab.records.record import Benchmark, Record, StepRecord
from steplab.records.run import Run
from steplab.records.run_figures import RUN_FIGURES
from steplab.specs.step import FIELDS, StepSpec, describe
from steplab.specs.step_fields import Scalar as Scalar

Row = dict[str, Scalar]
Figures = tuple[Figure[Any], ...]
Step = Callable[[Any], StepSpec | None]


def run_row(run: Run) -> Row:
    """Row of a run; `steps` are those measured, which in alternating runs are not those requested."""
    row = step_row(run, _kind_of_run(run), RUN_FIGURES)
    return row | {"steps": len(run.samples_s)} if run.turns and run.samples_s else row


def step_row(record: StepRecord, kind: str, figures: Figures, step: Step = lambda record: record.spec) -> Row:
    """Row of a record: the step's fields, then figures."""
    spec = step(record)
    row = head(record, kind) | {"status": record.status} | step_columns(spec)
    row |= {"processes": spec.layout.world_size if spec else None} if isinstance(record, Run) else {}
    row |= {"device": record.device_name} | software(record) | values(figures, record)
    return row | {"failure": record.failure.message if record.failure else None}


def benchmark_row(run: Benchmark[Any], kind: str, figures: Figures, step: Step | None = None) -> Row:
    """Row of a benchmark: fields of the common step if any, figures, and numbers of failed cells."""
    row = head(run, kind) | (step_columns(step(run)) if step else {}) | values(figures, run)
    num_ok = sum(cell.failure is None for cell in run.cells)
    return row | {
        "num_cells": run.num_requested,
        "num_ok": num_ok,
        "num_failed": len(run.cells) - num_ok,
        "warnings": "interrupted" if run.is_interrupted else None,
        "device": run.device_name,
        **software(run),
        "status": run.status,
    }


DESCRIPTION: Figure[Any] = Figure(
    key="description", header="study", shared="study {}", rank=3, folds=True, find=lambda run: run.study.name
)


def head(record: Record, kind: str) -> Row:
    """First fields of every row; `kind` is the command that makes such records."""
    return {
        "id": record.id,
        "created_utc": record.created_utc,
        "kind": kind,
        "name": record.name,
        "tags": " ".join(record.tags) or None,
        "comment": record.comment or None,
    }


def step_columns(spec: StepSpec | None) -> Row:
    return {field.column: field.value(spec) if spec else None for field in FIELDS.values()}


def step_key(spec: StepSpec) -> Row:
    """Fields of a spec that affect the computation, without those on how to measure."""
    fields = (field for field in FIELDS.values() if field.about.role not in ("how", "device"))
    return {field.column: field.value(spec) for field in fields}


def software(record: Record) -> Row:
    env = record.environment
    return {"torch": env.torch if env else None, "git_commit": env.git_commit if env else None}


KINDS_OF_RUNS = ("run", "profile", "memory", "trace", "snapshot", "loop")
"""Values of `kind` in the rows of runs."""


def _kind_of_run(run: Run) -> str:
    if run.spec is None and run.timing is None:
        return "trace" if run.profile else "snapshot" if run.memory_profile else "run"
    if run.spec is None:
        return "loop"
    return "memory" if run.memory_profile else "profile" if run.profile else "run"


def run_cells(run: Run) -> tuple[MeasuredCell, ...]:
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
    if run.profile:
        yield from _profiled(run.profile)


def _times(run: Run, row: Row) -> Iterator[MeasuredFigure]:
    for phase in run.timing.back_to_back if run.timing else ():
        if not phase.best_s or not all(phase.best_s):
            continue
        whole = phase.phase == "step"
        group: Group = "time" if whole else "phase"
        name = "step time" if whole else phase.phase
        yield MeasuredFigure(name=name, group=group, unit="s", samples=phase.best_s, decides=whole)
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


def _profiled(profile: Profile) -> Iterator[MeasuredFigure]:
    steps = profile.num_steps
    for category in CATEGORIES:
        if total_s := profile.category_s(category):
            yield _single(category, "kernels", "s", total_s / steps)
    if sent := profile.communication:
        yield _single("communication", "communication", "s", sent.total_s / steps)
        yield _single("exposed communication", "communication", "s", sent.exposed_s / steps)


def _single(name: str, group: Group, unit: str, value: float, *, decides: bool = False) -> MeasuredFigure:
    return MeasuredFigure(name=name, group=group, unit=unit, samples=(value,), decides=decides)
