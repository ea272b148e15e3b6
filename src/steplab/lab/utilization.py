"""MFU and HFU of a step, stored with their inputs."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from steplab.costs import flops as costs
from steplab.errors import SteplabError
from steplab.records.environment import DeviceInfo
from steplab.records.run import ModelFacts, Run, Utilization
from steplab.records.validation import first_problem
from steplab.specs.hardware import find_hardware
from steplab.specs.step import StepSpec
from steplab.store.database import Store
from steplab.units import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakFigure:
    flops_per_s: float | None
    source: str
    """Data sheet or measurement of the peak, or why it is unknown."""
    measured: bool = False


def with_utilizations(run: Run, store: Store) -> Run:
    """Add MFU and HFU to the run, by the GPU's stated peak or this machine's measured one."""
    if run.spec is None or run.environment is None:
        return run
    peak = peak_figure(run.environment.device, costs.DTYPE_OF_MATMULS[run.spec.precision], store)
    used = utilizations(run, peak)
    if peak.measured and _done_over(used):
        why = "is below what this step reached; run `steplab doctor` again on an idle machine"
        used = utilizations(run, PeakFigure(flops_per_s=None, source=f"the ceiling that was {peak.source} {why}"))
    notes = (*run.notes, *_over_the_peak(used, peak), *_uncounted(run, used))
    return dataclasses.replace(run, utilizations=used, notes=notes)


def with_given_flops(run: Run, flops: float, precision: str, num_ranks: int, store: Store) -> Run:
    if run.failure or run.environment is None or not run.median_s:
        return run
    peak = peak_figure(run.environment.device, costs.DTYPE_OF_MATMULS[precision], store)
    used = (_utilization("mfu", "given", flops, precision, run.median_s, peak, num_ranks),)
    if absurd := first_problem(used):
        return dataclasses.replace(run, notes=(*run.notes, f"MFU: not with these flops_per_step: {absurd}"))
    gaps = () if peak.flops_per_s else (f"MFU: {peak.source}",)
    return dataclasses.replace(run, utilizations=used, notes=(*run.notes, *gaps, *_over_the_peak(used, peak)))


def peak_figure(device: DeviceInfo, dtype: str, store: Store) -> PeakFigure:
    """Peak FLOP/s: stated for a known GPU, else the highest that `steplab doctor` measured on an idle machine with this
    device and number of threads: other work only lowers a measurement.
    """
    hardware = find_hardware(device.name)
    stated = hardware.peak_flops(dtype) if hardware else None
    if stated:
        return PeakFigure(flops_per_s=stated.flops_per_s, source=stated.source)
    try:
        found = store.ceilings(device.name)
    except SteplabError as error:  # a store that fails must not cost the measurement in hand
        return PeakFigure(flops_per_s=None, source=f"the measured ceilings could not be read: {error}")
    alike = [record for record in found if record.serves(device)]
    measured = [
        (matmul.best_per_s, record) for record in alike if not record.doubt and (matmul := record.matmul(dtype))
    ]
    if measured:
        highest, record = max(measured, key=lambda pair: pair[0])
        best_of = f"the highest of {len(measured)} records, " if len(measured) > 1 else ""
        source = f"measured: {dtype} matmul by steplab doctor, {best_of}{record.created_utc[:10]}, record {record.id}"
        return PeakFigure(flops_per_s=highest, source=source, measured=True)
    where, measure = device.name, "steplab doctor"
    if alike and alike[0].doubt:
        why = f"the ceilings of record {alike[0].id} are doubtful: {alike[0].doubt}"
        return PeakFigure(flops_per_s=None, source=f"{why} Run `steplab doctor` on an idle machine")
    if found and device.threads is not None:  # measured, but with another number of threads
        where += f" with {counted(device.threads, 'thread')}"
        measure = f"OMP_NUM_THREADS={device.threads} steplab doctor"
    why = f"no {dtype} peak is known for {where}; `{measure}` measures one for later runs"
    return PeakFigure(flops_per_s=None, source=why)


def utilizations(run: Run, peak: PeakFigure) -> tuple[Utilization, ...]:
    """MFU by each convention with known sizes, and HFU; empty for a failed step, or unknown sizes."""
    step_s = run.median_s
    if run.spec is None or run.model is None or step_s is None:
        return ()
    spec = run.spec
    num_devices = spec.layout.world_size
    return tuple(
        _utilization(kind, convention, flops, spec.precision, step_s, peak, num_devices)
        for kind, convention, flops in _flops_per_step(run.spec, run.model)
        if flops is not None
    )


def _utilization(
    kind: Literal["mfu", "hfu"],
    convention: str,
    flops: float,
    precision: str,
    step_s: float,
    peak: PeakFigure,
    num_devices: int,
) -> Utilization:
    return Utilization(
        kind=kind,
        convention=convention,
        flops=flops,
        dtype=costs.DTYPE_OF_MATMULS[precision],
        peak_flops_per_s=peak.flops_per_s,
        peak_source=peak.source,
        value=flops / step_s / (peak.flops_per_s * num_devices) if peak.flops_per_s else None,
        num_devices=num_devices,
    )


def _over_the_peak(used: Sequence[Utilization], peak: PeakFigure) -> list[str]:
    over = [u for u in used if u.exceeds_peak]
    if not over:
        return []
    if done := _done_over(used):
        why = "the step exceeds the stated peak of the device, so one of the two figures is wrong"
    elif over[0].convention != "given":
        why = f"the convention '{over[0].convention}' counts FLOPs that the step does not execute"
    else:
        why = "the FLOPs that the recorder was given are more than the step can have executed, or the peak is too low"
        why += "; `steplab doctor` measures it again" if peak.measured else ""
    kinds = " and ".join(dict.fromkeys(u.kind.upper() for u in done or over))
    return [f"{kinds} over 100 %: {why}"]


def _done_over(used: Sequence[Utilization]) -> list[Utilization]:
    return [u for u in used if u.exceeds_peak and u.convention in ("causal", "counted", "as_executed")]


def _uncounted(run: Run, used: Sequence[Utilization]) -> list[str]:
    spec = run.spec
    if not used or spec is None or spec.model.kind != "hf":
        return []
    if not spec.checkpoints_apply or spec.checkpointing == "none":
        return []
    return ["HFU: steplab has no formula for recomputation in a transformers model"]


def _flops_per_step(spec: StepSpec, model: ModelFacts) -> list[tuple[Literal["mfu", "hfu"], str, float | None]]:
    """Kind, convention and FLOPs per step; for models without a formula, FLOPs counted while running."""
    if model.is_counted:
        of_one: list[tuple[Literal["mfu", "hfu"], str, float | None]] = [
            ("mfu", "counted", model.needed_flops),
            ("hfu", "as_executed", model.counted_flops),
        ]
        ranks = spec.layout.world_size
        return [(kind, name, None if flops is None else flops * ranks) for kind, name, flops in of_one]
    sizes: costs.ModelSizes = {
        "num_parameters": model.num_active_parameters or model.num_parameters,
        "num_embedding_parameters": model.num_embedding_parameters,
        "num_layers": model.num_layers,
        "attention_width": model.attention_width,
    }
    backward = spec.pass_name != "forward"
    per_token: list[tuple[Literal["mfu", "hfu"], str, float | None]] = [
        ("mfu", name, costs.model_flops_per_token(name, **sizes, context=spec.context, backward=backward))
        for name in get_args(costs.Convention)
        if model.is_causal or name != "causal"
    ]
    per_token.append(("hfu", "as_executed", costs.executed_flops_per_token(spec, model.is_causal, **sizes)))
    return [(kind, name, flops * spec.tokens_of_all if flops is not None else None) for kind, name, flops in per_token]
