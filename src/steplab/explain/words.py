"""Changes as the user would type them."""

import dataclasses
import shlex
from collections.abc import Mapping

from steplab.specs.model import MODEL_SIZES
from steplab.specs.step import StepSpec, external_name

_DEFAULTS = {f.name: f.default for f in dataclasses.fields(StepSpec) if f.default is not dataclasses.MISSING}


def command(spec: StepSpec, changes: Mapping[str, str]) -> str:
    """The command that measures the spec's step with some fields changed, defaults left out."""
    values = _model_options(spec)
    for name, default in _DEFAULTS.items():
        if getattr(spec, name) != default:
            values[external_name(name)] = str(getattr(spec, name))
    values |= changes
    words = [f"--{name.replace('_', '-')} {shlex.quote(value)}" for name, value in values.items()]
    return " ".join(["steplab run", *words])


def _model_options(spec: StepSpec) -> dict[str, str]:
    options, shape, base = {"model": spec.model.name}, spec.model.shape, MODEL_SIZES.get(spec.model.name)
    if shape is None or base is None:
        return options
    for size in dataclasses.fields(shape):
        if getattr(shape, size.name) != getattr(base, size.name):
            options[f"model.{size.name}"] = str(getattr(shape, size.name))
    return options
