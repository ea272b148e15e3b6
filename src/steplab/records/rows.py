"""Flat rows of records, for tables, listings and CSV. Names end in the unit; None is a missing value."""

from typing import Any

from steplab.records.figure import values
from steplab.records.record import Benchmark, Record
from steplab.records.run import Run
from steplab.records.run_figures import RUN_FIGURES
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.step_fields import Scalar as Scalar

Row = dict[str, Scalar]


def run_row(run: Run) -> Row:
    """Fields of the step, then figures."""
    spec = run.spec
    row = head(run, _kind_of_run(run)) | {"status": run.status} | step_columns(spec)
    row |= {"processes": spec.layout.world_size if spec else None, "device": run.device_name}
    row |= software(run) | values(RUN_FIGURES, run)
    return row | {"failure": run.failure.message if run.failure else None}


def head(record: Record, kind: str) -> Row:
    """The first fields of every row; `kind` is the command that makes such records."""
    return {
        "id": record.id,
        "created_utc": record.created_utc,
        "kind": kind,
        "name": record.name,
        "tags": " ".join(record.tags) or None,
        "comment": record.comment or None,
    }


def step_columns(spec: StepSpec | None) -> Row:
    """Every field of a step; all None without one."""
    return {field.column: field.value(spec) if spec else None for field in FIELDS.values()}


def step_key(spec: StepSpec) -> Row:
    """Fields that affect a step's computation; fields of measuring are left out."""
    fields = (field for field in FIELDS.values() if field.about.role not in ("how", "device"))
    return {field.column: field.value(spec) for field in fields}


def software(record: Record) -> Row:
    """Version of torch, and commit of the folder."""
    env = record.environment
    return {"torch": env.torch if env else None, "git_commit": env.git_commit if env else None}


KINDS_OF_RUNS = ("run", "profile", "memory", "trace", "snapshot", "loop")
"""Values of `kind` in the rows of runs."""


def _kind_of_run(run: Run) -> str:
    """run; profile or memory if watched; trace, snapshot or loop without a requested step."""
    if run.spec is None and run.timing is None:
        return "trace" if run.profile else "snapshot" if run.memory_profile else "run"
    if run.spec is None:
        return "loop"
    return "memory" if run.memory_profile else "profile" if run.profile else "run"


def tail(run: Benchmark[Any]) -> Row:
    """The last fields of a benchmark's row."""
    num_ok = sum(cell.failure is None for cell in run.cells)
    return {
        "num_cells": run.num_requested,
        "num_ok": num_ok,
        "num_failed": len(run.cells) - num_ok,
        "warnings": "interrupted" if run.is_interrupted else None,
        "device": run.device_name,
        **software(run),
        "status": run.status,
    }
