"""Flat rows of records, for tables, listings and CSV. Names end in the unit; a missing value is None."""

from typing import Any

from steplab.records.attention import AttentionRun
from steplab.records.ceilings import Ceilings
from steplab.records.comm import CommRun
from steplab.records.ddp import DdpRun
from steplab.records.numerics import Numerics
from steplab.records.record import Benchmark, Record
from steplab.records.run import Run
from steplab.records.run_figures import RUN_FIGURES
from steplab.specs.comm import COLLECTIVES
from steplab.specs.step import FIELDS
from steplab.specs.step_fields import Scalar as Scalar

Row = dict[str, Scalar]


def run_row(run: Run) -> Row:
    """The row of a run: every field of the step, then every figure."""
    spec = run.spec
    row = _head(run, _kind_of_run(run)) | {"status": run.status}
    row |= {field.column: field.value(spec) if spec else None for field in FIELDS.values()}
    row |= {"processes": spec.layout.world_size if spec else None, "device": run.device_name}
    row |= _software(run) | {figure.key: figure.find(run) for figure in RUN_FIGURES}
    return row | {"failure": run.failure.message if run.failure else None}


def numerics_row(numerics: Numerics) -> Row:
    """The row of a precision audit, or of a study of sums alone."""
    spec = numerics.spec
    row = _head(numerics, "precision") | {"status": numerics.status}
    row |= {field.column: field.value(spec) if spec else None for field in FIELDS.values()}
    return row | {
        "device": numerics.device_name,
        **_software(numerics),
        "failure": numerics.failure.message if numerics.failure else None,
    }


def attention_row(run: AttentionRun) -> Row:
    """The row of a benchmark of attention."""
    return _head(run, "attention") | {"description": run.study.name} | _tail(run, num_cells=len(run.study.cells))


def comm_row(run: CommRun) -> Row:
    """The row of a benchmark of collectives."""
    collectives = dict.fromkeys(cell.collective for cell in run.study.cells)
    return (
        _head(run, "comm")
        | {
            "description": run.study.name,
            "num_ranks": run.study.num_processes,
            "backend": ", ".join(dict.fromkeys(cell.transport for cell in run.study.cells)),
            "collectives": "all" if set(collectives) == set(COLLECTIVES) else ", ".join(collectives),
        }
        | _tail(run, num_cells=len(run.study.cells))
    )


def ddp_row(run: DdpRun) -> Row:
    """The row of a data-parallel study."""
    step = run.study.step
    return (
        _head(run, "ddp")
        | {
            **{field.column: field.value(step) for field in FIELDS.values()},
            "num_ranks": run.study.processes,
            "backend": run.facts.backend if run.facts else None,
            "contenders": "; ".join(dict.fromkeys(who.family for who in run.study.contenders if who.kind != "none")),
        }
        | _tail(run, num_cells=len(run.study.contenders))
    )


def ceilings_row(record: Ceilings) -> Row:
    """The row of a set of ceilings: the device and each of its rates."""
    row = _head(record, "doctor") | {"device": record.device_name, "status": record.status} | _software(record)
    for ceiling in record.ceilings:
        unit = "flops_per_s" if ceiling.unit == "FLOP/s" else "bytes_per_s"
        row["_".join(filter(None, (ceiling.name, ceiling.dtype, unit)))] = ceiling.best_per_s
    return row


def _head(record: Record, kind: str) -> Row:
    """The first fields of every row; `kind` is the command that makes such records, and what `steplab list` says."""
    return {
        "id": record.id,
        "created_utc": record.created_utc,
        "kind": kind,
        "name": record.name,
        "tags": " ".join(record.tags) or None,
        "comment": record.comment or None,
    }


def _software(record: Record) -> Row:
    """What was installed where the record was made."""
    env = record.environment
    return {"torch": env.torch if env else None, "git_commit": env.git_commit if env else None}


def _kind_of_run(run: Run) -> str:
    """run, or profile or memory where its steps were watched; trace, snapshot or loop where no step was asked for."""
    if run.spec is None and run.timing is None:
        return "trace" if run.profile else "snapshot" if run.memory_profile else "run"
    if run.spec is None:
        return "loop"
    return "memory" if run.memory_profile else "profile" if run.profile else "run"


KINDS_IN_LISTS = (
    *("run", "profile", "memory", "trace", "snapshot", "loop"),
    *("precision", "attention", "comm", "ddp", "doctor"),
)
"""What the field `kind` of a row says."""


def _tail(run: Benchmark[Any], num_cells: int) -> Row:
    """The last fields of a benchmark's row. An interrupted benchmark has only the first of the requested cells."""
    num_ok = sum(cell.failure is None for cell in run.cells)
    return {
        "num_cells": num_cells,
        "num_ok": num_ok,
        "num_failed": len(run.cells) - num_ok,
        "device": run.device_name,
        **_software(run),
        "status": run.status,
    }
