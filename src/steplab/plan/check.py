"""Predictions beside measurements: of stored runs, and of rows of published steps.

A stored run is predicted as `plan time` does. A published row is predicted with the factors of its source and GPU where
some were fitted (plan.stack_fit), by a fit that has not seen its like; else with the kernels' rates alone.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from statistics import median

from steplab.costs.flops import DTYPE_OF_MATMULS
from steplab.costs.rates import Gpu, gpu_of
from steplab.errors import Unsupported, UserError
from steplab.plan.host_pace import runs_that_waited
from steplab.plan.memory import predict_memory
from steplab.plan.public import PublicLoad, PublicRow, StackRates, load_of, split_step, step_of
from steplab.plan.seen import was_fitted
from steplab.plan.stack_fit import counts, loaded_rows, unseen_stacks
from steplab.plan.time import predict_step_time
from steplab.records.run import Run
from steplab.records.step_time import StepTimePrediction
from steplab.records.time_check import RECORDS, TimeCheck
from steplab.records.timing import waits_for_host
from steplab.specs.hardware import find_hardware, hardware_named
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import RECORD_THEIR_OWN

_KINDS = {"matmul": "matmul", "attention": "attention"}
"""Categories of a profile -> kinds of operators; all others are streaming."""


def check_runs(
    runs: Sequence[Run], on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[TimeCheck]:
    """A check of every measured step of one process on a GPU, in the order of the runs; on_progress: called with how
    many have been checked, and of how many."""
    timed = [run for run in runs if run.timing is not None and run.spec is not None and run.device_name]
    waiting, predicted, found = _that_waited(timed), cache(_predicted), list[TimeCheck]()
    for run in timed:
        on_progress(len(found), len(timed))
        found.append(_check_run(run, run.id in waiting, predicted))
    return found


_Predicted = tuple[StepTimePrediction, int | None]
"""The time of a step, and bytes of its peak; None: not known."""


def _predicted(spec: StepSpec, device_name: str) -> _Predicted:
    """Raises UserError for a step or a GPU whose time is not known."""
    time = predict_step_time(spec, _gpu_of(device_name))
    return time, _peak_bytes(spec, device_name)


def _check_run(run: Run, device_waited: bool, predict: Callable[[StepSpec, str], _Predicted]) -> TimeCheck:
    assert run.spec is not None
    assert run.timing is not None
    spec = run.spec
    peaks = {peak.phase: peak.peak_allocated_bytes for peak in run.memory.peaks} if run.memory else {}
    blank = TimeCheck(
        id=run.id,
        source=RECORDS,
        gpu=run.device_name or "",
        cell=_cell(spec),
        precision=spec.precision,
        compiled=spec.compile != "off",
        measured_step_time_s=run.median_s,
        measured_peak_bytes=None if spec.compile in RECORD_THEIR_OWN else peaks.get("step"),
        device_waited=device_waited,
    )
    try:
        gpu = _gpu_of(blank.gpu)
        predicted, peak_bytes = predict(spec.as_predicted, blank.gpu)
    except UserError as error:
        return dataclasses.replace(blank, unsupported=_reason(error))
    kinds: dict[str, float] = defaultdict(float)
    for part in predicted.parts:
        kinds[part.kind] += part.seconds
    return dataclasses.replace(
        blank,
        gpu=gpu.name,
        predicted_step_time_s=predicted.central_s,
        low_s=predicted.low_s,
        high_s=predicted.high_s,
        predicted_peak_bytes=peak_bytes,
        fitted=gpu.is_fitted and was_fitted(run, gpu.rates),
        # of a foreign model, whose records are not grouped by phase for a host's pace, by its record and the prediction
        device_waited=device_waited
        or (
            spec.model.kind == "hf"
            and (waits_for_host(run.timing.back_to_back) or any(p.bound == "host" for p in predicted.phases))
        ),
        predicted_kinds_s=dict(kinds) if run.profile else {},
        measured_kinds_s=_measured_kinds(run),
    )


def _reason(error: UserError) -> str:
    return error.why if isinstance(error, Unsupported) else str(error)


def _gpu_of(device_name: str) -> Gpu:
    hardware = find_hardware(device_name)
    if hardware is None:
        raise UserError(f"{device_name} is not in the catalogue of hardware")
    return gpu_of(hardware)


def _peak_bytes(spec: StepSpec, device_name: str) -> int | None:
    try:
        return predict_memory(spec, device=device_name).peak_bytes
    except Unsupported:
        return None


def _cell(spec: StepSpec) -> str:
    compiled = "eager" if spec.compile == "off" else f"compile {spec.compile}"
    parts = [spec.model.label, f"{spec.batch}×{spec.context}", spec.pass_name, spec.precision, compiled, spec.attention]
    return " ".join([*parts, *([spec.checkpointing] if spec.checkpointing != "none" else [])])


def _measured_kinds(run: Run) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for phase in run.profile.phases if run.profile else ():
        for category, seconds in phase.categories.items():
            found[_KINDS.get(category, "streaming")] += seconds / (run.profile.num_steps if run.profile else 1)
    return dict(found)


def _that_waited(runs: Sequence[Run]) -> set[str]:
    """Ids of the runs in one of whose phases the device waited for the host."""
    found: set[str] = set()
    by_gpu: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_gpu[run.device_name or ""].append(run)
    for device_name, own in by_gpu.items():
        try:
            gpu = _gpu_of(device_name)
        except UserError:
            continue
        found |= runs_that_waited([run for run in own if run.spec and run.spec.model.kind == "transformer"], gpu)
    return found


# --- published rows -----------------------------------------------------------------------------------------------


def check_rows(rows: Sequence[PublicRow]) -> list[TimeCheck]:
    """A check of every row whose time counts, in their order."""
    scored = [row for row in rows if counts(row)]
    loaded = list(loaded_rows(scored))
    stacks, constants = unseen_stacks(loaded), _constants(scored)
    loads = {row.id: load for row, load, _ in loaded}
    return [_check_row(row, loads.get(row.id), stacks.get(row.id), constants.get(row.id)) for row in scored]


def _check_row(
    row: PublicRow, load: PublicLoad | None, stack: StackRates | None, constant_s: float | None
) -> TimeCheck:
    model = row.model
    sizes = f"{model.key} {row.gpus}×{row.gpu} {row.micro_batch}×{row.seq}×{row.grad_accum}"
    blank = TimeCheck(
        id=row.id,
        source=row.group,
        gpu=row.steplab_gpu or row.gpu,
        job=row.job,
        cell=f"{sizes} {row.passes}{' recomputed' if row.recompute == 'full' else ''}",
        precision=str(row.precision.get("compute")),
        compiled=row.compile is True,
        measured_step_time_s=row.measured_s,
        constant_s=constant_s,
    )
    try:
        spec = step_of(row)
        assert row.card is not None
        gpu = gpu_of(hardware_named(row.card))
        used = stack or StackRates(spread=gpu.rates.step.spread["elsewhere"])
        seconds = split_step(row, gpu).seconds if row.is_split else (load or load_of(row, gpu)).seconds(used)
    except Unsupported as error:
        return dataclasses.replace(blank, unsupported=_reason(error))
    return dataclasses.replace(
        blank,
        precision=spec.precision,
        predicted_step_time_s=seconds,
        low_s=seconds * (1 - used.spread),
        high_s=seconds * (1 + used.spread),
    )


def _constants(rows: Sequence[PublicRow]) -> dict[str, float]:
    """Seconds of each row by one share of the stated peak, of the model's FLOPs by the convention that suits it best
    (full: 6 N + 12 L d T a token), for all rows of a source on a GPU: the median of what they reach, fitted to all."""
    groups: dict[tuple[str, str], list[tuple[PublicRow, float]]] = defaultdict(list)
    for row, at_peak_s in _at_peak(rows):
        groups[row.group, str(row.card)].append((row, at_peak_s))
    found: dict[str, float] = {}
    for own in groups.values():
        share = median(at_peak_s / (row.measured_s or 1.0) for row, at_peak_s in own)
        found |= {row.id: at_peak_s / share for row, at_peak_s in own}
    return found


def _at_peak(rows: Sequence[PublicRow]) -> Iterator[tuple[PublicRow, float]]:
    for row in rows:
        try:
            spec = step_of(row)
        except Unsupported:
            continue
        assert row.card is not None
        passes = 1 if spec.pass_name == "forward" else 3
        attention = (row.model.layers or 0) * (row.model.hidden or 0) * spec.context
        flops = passes * 2 * (row.num_parameters + 2 * attention) * spec.tokens * spec.micro_steps
        flops *= spec.layout.data_ranks / (row.gpus or 1) if row.is_split else 1
        peak = hardware_named(row.card).peaks[DTYPE_OF_MATMULS[spec.precision]].flops_per_s
        yield row, flops / peak
