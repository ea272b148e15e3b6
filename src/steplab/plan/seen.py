"""Records that a fit has seen, and records held out of it."""

from collections.abc import Mapping, Sequence

from steplab.costs.rates import GpuRates
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.step_choices import FP8


def is_held_out(spec: StepSpec, held_out: Mapping[str, Sequence[str]]) -> bool:
    """True if one of the fields has one of the values; a changed size counts by the model's name too."""
    for name, values in held_out.items():
        shown = str(FIELDS[name].value(spec))
        if shown in values or (name == "model" and spec.model.name in values):
            return True
    return False


def was_fitted(record: Record, rates: GpuRates) -> bool:
    """True if the rates were fitted to the record, or to others of its cell."""
    if not isinstance(record, Run) or record.spec is None or not is_fitted_kind(record.spec):
        return False
    return record.created_utc <= rates.until_utc and not is_held_out(record.spec, rates.held_out)


def is_fitted_kind(spec: StepSpec) -> bool:
    """True for fitted kinds of steps: steplab's own Transformer in one process; fp8 has rates of single layers."""
    return spec.model.kind == "transformer" and spec.layout.world_size == 1 and spec.precision not in FP8
