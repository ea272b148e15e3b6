"""Tells which records the kernels' rates were fitted to, and which were held out of the fit."""

from collections.abc import Mapping, Sequence

from steplab.costs.rates import GpuRates
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.step_choices import FP8


def is_held_out(spec: StepSpec, held_out: Mapping[str, Sequence[str]]) -> bool:
    """True if one of the spec's fields has a held-out value; a resized model also counts as its original."""
    return any(
        str(FIELDS[name].value(spec)) in values or (name == "model" and spec.model.name in values)
        for name, values in held_out.items()
    )


def was_fitted(record: Record, rates: GpuRates) -> bool:
    """True if the rates were fitted to this record, or to others of its configuration."""
    if not isinstance(record, Run) or record.spec is None or not is_fitted_kind(record.spec):
        return False
    return record.created_utc <= rates.until_utc and not is_held_out(record.spec, rates.held_out)


def is_fitted_kind(spec: StepSpec) -> bool:
    """True for steps that rates are fitted to: steplab's own Transformer in one process.

    fp8 is excluded, because its rates come from single layers.
    """
    return spec.model.kind == "transformer" and spec.layout.world_size == 1 and spec.precision not in FP8
