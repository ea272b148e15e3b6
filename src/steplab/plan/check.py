"""Compares the predictions of `plan time` with the measured steps of stored runs."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

from steplab.costs.rates import Gpu, gpu_of
from steplab.errors import UserError
from steplab.plan.host_pace import runs_that_waited
from steplab.plan.seen import was_fitted
from steplab.records.run import Run
from steplab.records.step_time import StepTimePrediction, TimeCheck
from steplab.records.timing import waits_for_host
from steplab.specs.hardware import find_hardware
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import RECORD_THEIR_OWN


def check_runs(
    runs: Sequence[Run],
    predict: "Callable[[StepSpec, str], Predicted]",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[TimeCheck]:
    """Compare every timed run on a GPU with its prediction.

    predict: returns a step's predicted time and peak bytes (None: unknown) on a GPU, given by name; a UserError is
    recorded as the reason for no prediction. on_progress: called with the numbers of checked runs and of all.
    """
    timed = [run for run in runs if run.timing is not None and run.spec is not None and run.device_name]
    waiting, predicted, found = _that_waited(timed), cache(predict), list[TimeCheck]()
    for run in timed:
        on_progress(len(found), len(timed))
        found.append(_check_run(run, run.id in waiting, predicted))
    return found


def _that_waited(runs: Sequence[Run]) -> set[str]:
    by_gpu: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.device_name and find_hardware(run.device_name) and run.spec and run.spec.model.kind == "transformer":
            by_gpu[run.device_name].append(run)
    return {found for name, own in by_gpu.items() for found in runs_that_waited(own, _gpu_named(name))}


Predicted = tuple[StepTimePrediction, int | None]
"""(time, peak bytes; None: unknown)"""


def _gpu_named(device_name: str) -> Gpu:
    hardware = find_hardware(device_name)
    if hardware is None:
        raise UserError(f"{device_name} is not a known GPU")
    return gpu_of(hardware)


def _check_run(run: Run, waited: bool, predict: Callable[[StepSpec, str], Predicted]) -> TimeCheck:
    assert run.spec is not None
    assert run.timing is not None
    spec, peak = run.spec, run.memory.peak("step") if run.memory else None
    blank = TimeCheck(
        id=run.id,
        gpu=run.device_name or "",
        cell=_cell(spec),
        precision=spec.precision,
        compiled=spec.compile != "off",
        measured_step_time_s=run.median_s,
        measured_peak_bytes=peak.peak_allocated_bytes if peak and spec.compile not in RECORD_THEIR_OWN else None,
        device_waited=waited,
    )
    try:
        gpu = _gpu_named(blank.gpu)
        predicted, peak_bytes = predict(spec.as_predicted, gpu.name)
    except UserError as error:
        return dataclasses.replace(blank, unsupported=str(error))
    host_bound = waits_for_host(run.timing.back_to_back) or any(phase.bound == "host" for phase in predicted.phases)
    return dataclasses.replace(
        blank,
        gpu=gpu.name,
        predicted_step_time_s=predicted.central_s,
        low_s=predicted.low_s,
        high_s=predicted.high_s,
        predicted_peak_bytes=peak_bytes,
        fitted=gpu.is_fitted and was_fitted(run, gpu.rates),
        device_waited=waited or (spec.model.kind == "hf" and host_bound),
    )


def _cell(spec: StepSpec) -> str:
    compiled = "eager" if spec.compile == "off" else f"compile {spec.compile}"
    parts = [spec.model.label, f"{spec.batch}×{spec.context}", spec.pass_name, spec.precision, compiled, spec.attention]
    return " ".join([*parts, *([spec.checkpointing] if spec.checkpointing != "none" else [])])
