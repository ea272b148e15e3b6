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
    row: Row = {"id": run.id, "created_utc": run.created_utc, "name": run.name, "status": run.status}
    row |= {field.column: field.value(spec) if spec else None for field in FIELDS.values()}
    row |= {"processes": spec.layout.world_size if spec else None, "device": run.device_name}
    row |= {figure.key: figure.find(run) for figure in RUN_FIGURES}
    return row | {"failure": run.failure.message if run.failure else None}


def numerics_row(numerics: Numerics) -> Row:
    """The row of a precision audit, or of a study of sums alone."""
    spec = numerics.spec
    return _head(numerics) | {
        "status": numerics.status,
        "model": spec.model.label if spec else None,
        "precision": spec.precision if spec else None,
        "device": numerics.device_name,
        "failure": numerics.failure.message if numerics.failure else None,
    }


def attention_row(run: AttentionRun) -> Row:
    """The row of a benchmark of attention."""
    return _head(run) | {"description": run.study.name} | _tail(run, num_cells=len(run.study.cells))


def comm_row(run: CommRun) -> Row:
    """The row of a benchmark of collectives."""
    collectives = dict.fromkeys(cell.collective for cell in run.study.cells)
    return (
        _head(run)
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
        _head(run)
        | {
            "model": step.model.label,
            "batch": step.batch,
            "context": step.context,
            "precision": step.precision,
            "compile": run.study.compile,
            "num_ranks": run.study.processes,
            "backend": run.facts.backend if run.facts else None,
            "contenders": "; ".join(dict.fromkeys(who.family for who in run.study.contenders if who.kind != "none")),
        }
        | _tail(run, num_cells=len(run.study.contenders))
    )


def ceilings_row(record: Ceilings) -> Row:
    """The row of a set of ceilings: the device and each of its rates."""
    row = _head(record) | {"device": record.device_name}
    for ceiling in record.ceilings:
        unit = "flops_per_s" if ceiling.unit == "FLOP/s" else "bytes_per_s"
        row["_".join(filter(None, (ceiling.name, ceiling.dtype, unit)))] = ceiling.best_per_s
    return row


def _head(record: Record) -> Row:
    return {"id": record.id, "created_utc": record.created_utc, "name": record.name}


def _tail(run: Benchmark[Any], num_cells: int) -> Row:
    """The last fields of a benchmark's row. An interrupted benchmark has only the first of the requested cells."""
    num_ok = sum(cell.failure is None for cell in run.cells)
    return {
        "num_cells": num_cells,
        "num_ok": num_ok,
        "num_failed": len(run.cells) - num_ok,
        "device": run.device_name,
        "status": run.status,
    }
