"""Which records a fit has seen, and which were held out of it."""

from collections.abc import Mapping, Sequence

from steplab.costs.rates import GpuRates
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.specs.step import FIELDS, StepSpec


def is_held_out(spec: StepSpec, held_out: Mapping[str, Sequence[str]]) -> bool:
    """Whether one of the fields has one of the values; of a changed size, the name counts too."""
    for name, values in held_out.items():
        shown = str(FIELDS[name].value(spec))
        if shown in values or (name == "model" and spec.model.name in values):
            return True
    return False


def was_fitted(record: Record, rates: GpuRates) -> bool:
    """Whether the rates were fitted to the record, or to others of its cell."""
    if not isinstance(record, Run) or record.spec is None or not is_fitted_kind(record.spec):
        return False
    return record.created_utc <= rates.until_utc and not is_held_out(record.spec, rates.held_out)


def is_fitted_kind(spec: StepSpec) -> bool:
    """Whether steps of this kind are fitted: those of steplab's own Transformer that one process takes by itself."""
    return spec.model.kind == "transformer" and spec.layout.world_size == 1
