"""MFU and HFU of a step, each stored with what it is made of."""

import dataclasses
from dataclasses import dataclass
from statistics import median
from typing import get_args

from steplab.costs.flops import DTYPE_OF_MATMULS, Convention, executed_flops_per_token, model_flops_per_token
from steplab.records.environment import DeviceInfo
from steplab.records.run import Run, Utilization
from steplab.specs.hardware import find_hardware
from steplab.store.database import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakFigure:
    """A device's dense peak in one data type, or why there is none."""

    flops_per_s: float | None
    """None: not known."""
    source: str
    """Data sheet or measurement; or the reason it is not known."""


def with_utilizations(run: Run, store: Store) -> Run:
    """The run with its MFU and HFU, against the catalogue's peak or the one measured on this machine."""
    if run.spec is None or run.environment is None:
        return run
    peak = peak_figure(run.environment.device, DTYPE_OF_MATMULS[run.spec.precision], store)
    return dataclasses.replace(run, utilizations=utilizations(run, peak))


def peak_figure(device: DeviceInfo, dtype: str, store: Store) -> PeakFigure:
    """The device's dense peak: stated for a listed GPU, else measured by `steplab doctor`, else unknown.

    Never another device's figure.
    """
    hardware = find_hardware(device.name)
    stated = hardware.peak_flops(dtype) if hardware else None
    if stated:
        return PeakFigure(flops_per_s=stated.flops_per_s, source=stated.source)
    ceilings = store.latest_ceilings(device.name)
    measured = ceilings.matmul(dtype) if ceilings else None
    if ceilings and measured:
        source = f"measured: {dtype} matmul by steplab doctor, {ceilings.created_utc}, record {ceilings.id}"
        return PeakFigure(flops_per_s=measured.best_per_s, source=source)
    why = f"no {dtype} peak is known for {device.name}; `steplab doctor` measures one, for the runs after it"
    return PeakFigure(flops_per_s=None, source=why)


def utilizations(run: Run, peak: PeakFigure) -> tuple[Utilization, ...]:
    """MFU under every convention whose sizes are known, and HFU; empty for a failed or foreign step."""
    step = run.timing.phase("step") if run.timing else None
    if run.spec is None or run.model is None or step is None or not step.best_s:
        return ()
    spec = run.spec
    sizes = dataclasses.asdict(run.model)
    step_s = median(step.best_s)
    per_token: list[tuple[str, str, float | None]] = [
        ("mfu", name, model_flops_per_token(name, **sizes, context=spec.context, backward=spec.pass_name != "forward"))
        for name in get_args(Convention)
    ]
    if spec.model.kind != "factory":
        per_token.append(("hfu", "as_executed", executed_flops_per_token(spec, **sizes)))
    return tuple(
        Utilization(
            kind=kind,  # type: ignore[arg-type]
            convention=convention,
            flops=flops * spec.tokens,
            dtype=DTYPE_OF_MATMULS[spec.precision],
            peak_flops_per_s=peak.flops_per_s,
            peak_source=peak.source,
            value=flops * spec.tokens / step_s / peak.flops_per_s if peak.flops_per_s else None,
        )
        for kind, convention, flops in per_token
        if flops is not None
    )
