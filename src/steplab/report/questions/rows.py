"""Flattens records into rows of settings and figures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steplab.costs.data_parallel import Link, buckets_of
from steplab.records.profile import OUTSIDE, KernelStats, Profile
from steplab.records.record import Record
from steplab.records.registry import kind_of
from steplab.records.rows import Row, run_row, step_key
from steplab.records.run import Run
from steplab.report.kit.grouping import grouped
from steplab.report.kit.kernel_names import short_kernels
from steplab.report.report import RecordReport, report_of
from steplab.stats import summarize

WHOLE = "step"
"""Name of a profile's sum over all phases."""


@dataclass(slots=True)
class Sheet:
    settings: tuple[str, ...]
    """Fields that identify a measurement; other fields are figures."""
    rows: list[Row] = field(default_factory=list)
    """Oldest first."""


def _of_runs(records: Sequence[Record], rows: Callable[[Run, Row], Iterator[Row]], *further: str) -> Sheet:
    sheet, settings = Sheet(()), dict[str, None]()
    for run in records:
        if isinstance(run, Run) and run.spec is not None:
            kind = run.environment.device.kind if run.environment else None
            own: Row = step_key(run.spec) | {"warmup": run.spec.warmup, "device": run.device_name, "device_kind": kind}
            settings |= dict.fromkeys(own)
            sheet.rows += rows(run, {"id": run.id, **own})
    sheet.settings = (*settings, *further)
    return sheet


_OF_PHASE = ("mean", "deviation", "low", "high")
_SPREAD = (
    *(f"{phase}_{what}_s" for phase in ("step", "forward", "backward", "optimizer") for what in _OF_PHASE),
    "parameters",
    "residual_stream_bytes",
)


def _run_rows(run: Run, known: Row) -> Iterator[Row]:
    spread: Row = dict.fromkeys(_SPREAD)
    for phase in run.timing.back_to_back if run.timing else ():
        if len(phase.best_s) > 1:
            name = phase.phase.replace(" ", "_")
            found = summarize(phase.best_s)
            ends = (found.low, found.high) if found.is_interval else (None, None)
            figures = zip(_OF_PHASE, (found.mean, found.stdev, *ends), strict=True)
            spread |= {f"{name}_{what}_s": value for what, value in figures}
    if run.model:
        spread["parameters"] = run.model.num_parameters
    if run.spec and (shape := run.spec.model.shape) and run.spec.precision in ("fp32", "tf32", "fp16", "bf16"):
        spread["residual_stream_bytes"] = 4 * run.spec.batch * run.spec.context * shape.d_model
    yield run_row(run) | known | spread


def _kernel_rows(run: Run, known: Row) -> Iterator[Row]:
    for phase, kernels, profile in _phases(run):
        short = short_kernels(kernel.name for kernel in kernels)
        for (name, category), some in grouped(kernels, lambda kernel: (kernel.name, kernel.category)).items():
            time_s, busy_share = _times(some, kernels, profile)
            calls = round(sum(kernel.calls for kernel in some) / profile.num_steps, 1)
            row: Row = {"phase": phase, "kernel": short[name], "category": category, "kernel_s": time_s}
            yield known | row | {"calls": calls, "busy_share": busy_share}


def _category_rows(run: Run, known: Row) -> Iterator[Row]:
    for phase, kernels, profile in _phases(run):
        for category, some in grouped(kernels, lambda kernel: kernel.category).items():
            time_s, busy_share = _times(some, kernels, profile)
            yield known | {"phase": phase, "category": category, "kernels_s": time_s, "busy_share": busy_share}


def _times(some: Sequence[KernelStats], every: Sequence[KernelStats], profile: Profile) -> tuple[float, float | None]:
    """Seconds per step of the kernels `some`, and their share of the time of `every` kernel (None if that is zero)."""
    total_s, busy_s = (sum(kernel.total_s for kernel in kernels) for kernels in (some, every))
    return total_s / profile.num_steps, total_s / busy_s if busy_s else None


_CATEGORY = {"scores": "matmul", "softmax": "softmax", "values": "matmul"}
"""By part of attention, the category of kernels that counts. Others in its range mask, scale and copy."""


def _attention_rows(run: Run, known: Row) -> Iterator[Row]:
    """One row per part of attention in the forward pass."""
    for kernels, profile in ((kernels, profile) for phase, kernels, profile in _phases(run) if phase == "forward"):
        for part, category in _CATEGORY.items():
            own = [each for each in kernels if each.range.endswith(f"attention.{part}") and each.category == category]
            flops = [op.flops or 0.0 for op in profile.ops if op.range.endswith(f".{part}") and op.phase == "forward"]
            if own:
                total_s = sum(kernel.total_s for kernel in own) / profile.num_steps
                yield known | {"part": part, "part_s": total_s, "flops": sum(flops) / profile.num_steps}


def _phases(run: Run) -> list[tuple[str, list[KernelStats], Profile]]:
    if run.profile is None:
        return []
    kernels = [kernel for kernel in run.profile.kernels if kernel.phase != OUTSIDE]
    phases = dict.fromkeys(kernel.phase for kernel in kernels)
    of_phases = [(phase, [each for each in kernels if each.phase == phase], run.profile) for phase in phases]
    return [*of_phases, (WHOLE, kernels, run.profile)]


def _phase_rows(run: Run, known: Row) -> Iterator[Row]:
    for phase in run.profile.phases if run.profile else ():
        if (timed := run.phase_s(phase.phase)) is not None and run.profile:
            steps = run.profile.num_steps
            yield known | {
                "phase": phase.phase,
                "timer_s": timed,
                "kernels_s": phase.busy_s / steps,
                "waits_s": (phase.window_s - phase.busy_s) / steps,
                "launched": round(phase.num_kernels / steps, 1),
            }


def _allocation_rows(run: Run, known: Row) -> Iterator[Row]:
    for each in run.memory_profile.largest if run.memory_profile else ():
        yield known | {
            "allocation_bytes": each.requested_bytes,
            "number": each.count,
            "of": each.category,
            "phase": each.phase,
            "module": each.module,
            "operator": each.op,
            "line": each.source,
        }


def _peak_rows(run: Run, known: Row) -> Iterator[Row]:
    for phase in run.memory_profile.phases if run.memory_profile else ():
        yield known | {"phase": phase.name, "peak_bytes": phase.peak_bytes}


def _part_rows(run: Run, known: Row) -> Iterator[Row]:
    for category, num_bytes in run.memory_profile.at_peak.items() if run.memory_profile else ():
        yield known | {"category": category, "part_bytes": num_bytes}


def _own_rows(kind: str, settings: Sequence[str], table: str = "") -> Callable[[Sequence[Record]], Sheet]:
    def rows(records: Sequence[Record]) -> Sheet:
        sheet = Sheet(tuple(settings))
        for record in records:
            if kind_of(record).name != kind:
                continue
            own = report_of(kind)
            step = getattr(record, "spec", None) or getattr(getattr(record, "study", None), "step", None)
            known: Row = {"id": record.id} | (step_key(step) if step else {}) | {"machine": record.device_name}
            sheet.settings = tuple(dict.fromkeys((*sheet.settings, *(key for key in known if key != "id"))))
            data = own.rows(record) if isinstance(own, RecordReport) else own.documents([record])[0].data
            sheet.rows += [{**known, **row} for row in (data[table] if isinstance(data, Mapping) else data)]
        return sheet

    return rows


def _ddp_rows(records: Sequence[Record]) -> Sheet:
    """Adds the fitted overhead model's predictions for each variant's bucket size."""
    sheet = _own_rows("ddp", ("variant", "num_ranks"))(records)
    runs: dict[str, Any] = {run.id: run for run in records}
    for row in sheet.rows:
        run = runs[str(row["id"])]
        row["checked"] = "no" if row.get("deviation") is None else "yes"
        if (model := run.model) is None or run.facts is None:
            continue
        row |= {"gradient_bytes": model.gradient_bytes, "link_bytes_per_s": model.bytes_per_s, "call_s": model.call_s}
        row |= {"best_bucket_mb": float(f"{model.best_bucket_mb:.3g}"), "fit_error": model.worst_fit}
        if isinstance(size_mb := row["bucket_mb"], (int, float)):
            link = Link(bytes_per_s=model.bytes_per_s, call_s=model.call_s)
            buckets = buckets_of(model.gradient_bytes, size_mb * 1e6, run.facts.num_tensors)
            if isinstance(calls := row.get("num_calls"), int):
                buckets = calls
            row["overlapped_model_s"] = link.exposed_s(model.gradient_bytes, buckets, model.backward_s)
            row["serial_model_s"] = link.serial_s(model.gradient_bytes, buckets)
    return sheet


_SHAPE = ("batch", "heads", "kv_heads", "queries", "keys", "dim", "causal", "dtype", "implementation", "compile")

SHEETS: dict[str, Callable[[Sequence[Record]], Sheet]] = {
    "runs": lambda records: _of_runs(records, _run_rows),
    "phases": lambda records: _of_runs(records, _phase_rows, "phase"),
    "kernels": lambda records: _of_runs(records, _kernel_rows, "phase", "kernel", "category"),
    "categories": lambda records: _of_runs(records, _category_rows, "phase", "category"),
    "attention parts": lambda records: _of_runs(records, _attention_rows, "part"),
    "allocations": lambda records: _of_runs(
        records, _allocation_rows, "phase", "module", "operator", "line", "of", "allocation_bytes"
    ),
    "memory phases": lambda records: _of_runs(records, _peak_rows, "phase"),
    "memory parts": lambda records: _of_runs(records, _part_rows, "category"),
    "attention": _own_rows("attention", (*_SHAPE, "status")),
    "comm": _own_rows("comm", ("collective", "backend", "way", "world_size", "dtype", "size_bytes")),
    "ddp": _ddp_rows,
    "accumulation": _own_rows("numerics", ("sum",), "accumulation"),
    "audit": _own_rows("numerics", ("precision", "module", "class"), "audit"),
}
"""Functions that build the rows for questions, by name."""
