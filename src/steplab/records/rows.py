"""A record as one flat row: what tables, listings and CSV show. Fields end in their unit; absent is None."""

from statistics import median
from typing import Any

from steplab.records.attention import AttentionRun
from steplab.records.ceilings import Ceilings
from steplab.records.comm import CommRun
from steplab.records.ddp import DdpRun
from steplab.records.numerics import Numerics
from steplab.records.record import Benchmark, Record
from steplab.records.run import Run, Utilization
from steplab.records.timing import PhaseSamples, find_phase
from steplab.specs.comm import COLLECTIVES
from steplab.specs.step import FIELDS
from steplab.specs.step_fields import Scalar as Scalar

Row = dict[str, Scalar]


def run_row(run: Run) -> Row:
    """Every field of the step, then figures: medians of the raw samples, peaks, utilization under the default
    convention."""
    spec = run.spec
    row: Row = {"id": run.id, "created_utc": run.created_utc, "name": run.name, "status": run.status}
    row |= {field.column: field.value(spec) if spec else None for field in FIELDS.values()}
    row |= {"processes": spec.layout.world_size if spec else None, "device": run.device_name}
    timing, memory = run.timing, run.memory
    phases = timing.back_to_back if timing else ()
    step_s = _median(find_phase(phases, "step"))
    peak = memory.peak("step") if memory else None
    # An imported snapshot was measured by nobody here: its peak is the one that its history shows.
    watched = run.memory_profile if memory is None else None
    mfu, hfu = utilization(run, "mfu", "causal"), utilization(run, "hfu", "as_executed")
    used = mfu or hfu  # both are shares of one peak; a factory's model has HFU alone
    row |= {
        "step_time_s": step_s,
        "forward_s": _median(find_phase(phases, "forward")),
        "backward_s": _median(find_phase(phases, "backward")),
        "gradient_sync_s": _median(find_phase(phases, "gradient sync")),
        "optimizer_s": _median(find_phase(phases, "optimizer")),
        "compile_s": timing.first_step_s - step_s if timing and timing.first_step_s and step_s else None,
        "tokens_per_s": run.tokens_per_step / step_s if run.tokens_per_step and step_s else None,
        "mfu": mfu.value if mfu else None,
        "mfu_convention": mfu.convention if mfu else None,
        "hfu": hfu.value if hfu else None,
        "peak_flops_per_s": used.peak_flops_per_s if used else None,
        "peak_source": used.peak_source if used else None,
        "peak_allocated_bytes": peak.peak_allocated_bytes if peak else watched.peak_bytes if watched else None,
        "peak_reserved_bytes": peak.peak_reserved_bytes if peak else watched.reserved_bytes if watched else None,
        "host_peak_bytes": memory.host_peak_bytes if memory else None,
        "memory_source": run.memory_profile.source if run.memory_profile else None,
        "failure": run.failure.message if run.failure else None,
    }
    return row


def numerics_row(numerics: Numerics) -> Row:
    """One row that names an audit, or a study of sums alone."""
    spec = numerics.spec
    return _head(numerics) | {
        "status": numerics.status,
        "model": spec.model.label if spec else None,
        "precision": spec.precision if spec else None,
        "device": numerics.device_name,
        "failure": numerics.failure.message if numerics.failure else None,
    }


def attention_row(run: AttentionRun) -> Row:
    """One row that names a benchmark of attention."""
    return _head(run) | {"description": run.study.name} | _tail(run, num_cells=len(run.study.cells))


def comm_row(run: CommRun) -> Row:
    """One row that names a benchmark of collectives."""
    collectives = dict.fromkeys(cell.collective for cell in run.study.cells)
    return (
        _head(run)
        | {
            "description": run.study.name,
            "num_ranks": run.study.num_processes,
            "backend": ", ".join(dict.fromkeys(cell.way for cell in run.study.cells)),
            "collectives": "all" if set(collectives) == set(COLLECTIVES) else ", ".join(collectives),
        }
        | _tail(run, num_cells=len(run.study.cells))
    )


def ddp_row(run: DdpRun) -> Row:
    """One row that names a data-parallel study."""
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
    """One row that names a device and has each of its rates."""
    row = _head(record) | {"device": record.device_name}
    for ceiling in record.ceilings:
        unit = "flops_per_s" if ceiling.unit == "FLOP/s" else "bytes_per_s"
        row["_".join(filter(None, (ceiling.name, ceiling.dtype, unit)))] = ceiling.best_per_s
    return row


def _head(record: Record) -> Row:
    return {"id": record.id, "created_utc": record.created_utc, "name": record.name}


def _tail(run: Benchmark[Any], num_cells: int) -> Row:
    """Of the cells that were asked for, an interrupted benchmark has the first."""
    num_ok = sum(cell.failure is None for cell in run.cells)
    return {
        "num_cells": num_cells,
        "num_ok": num_ok,
        "num_failed": len(run.cells) - num_ok,
        "device": run.device_name,
        "status": run.status,
    }


def utilization(run: Run, kind: str, convention: str) -> Utilization | None:
    """The stored utilization of a kind under a convention; the rule of thumb `params` where causal is unknown."""
    of_kind = [u for u in run.utilizations if u.kind == kind]
    exact = [u for u in of_kind if u.convention == convention]
    return next(iter(exact or of_kind), None)


def _median(samples: PhaseSamples | None) -> float | None:
    return median(samples.best_s) if samples and samples.best_s else None
