"""A step as the user would type it."""

import shlex
from collections.abc import Mapping
from types import MappingProxyType

from steplab.specs.model import MODEL_SIZES, SIZE_FIELDS
from steplab.specs.step import STEP_FIELDS, StepSpec
from steplab.specs.step_fields import option_name


def command(spec: StepSpec, changes: Mapping[str, str] = MappingProxyType({})) -> str:
    """The command that measures the spec's step with some fields changed; it omits defaults."""
    return f"steplab run {options(spec, changes)}"


def options(spec: StepSpec, changes: Mapping[str, str] = MappingProxyType({})) -> str:
    """The options of the spec's step, with some fields changed; they omit defaults."""
    values = {"model": spec.model.name}
    base = MODEL_SIZES.get(spec.model.name)
    for field in (*SIZE_FIELDS, *STEP_FIELDS):
        default = getattr(base, field.attribute, None) if field in SIZE_FIELDS else field.default
        if field.key != "model" and field.read(spec) != default:
            values[field.key] = str(field.read(spec))
    values |= changes
    return " ".join(f"{option_name(name)} {shlex.quote(value)}" for name, value in values.items())
