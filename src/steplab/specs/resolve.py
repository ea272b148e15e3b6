"""From what a person wrote (`{"model": "small", "model.num_layers": "4", "context": 256}`) to a StepSpec.

The command line, study files and the Python interface all come through here, so that a wrong name or type
gets the same message everywhere.
"""

import dataclasses
import difflib
import itertools
from collections.abc import Mapping, Sequence

from steplab.errors import UserError
from steplab.specs.layout import Layout, parse_layout
from steplab.specs.layout_options import without_a_say
from steplab.specs.model import TransformerShape, model_spec
from steplab.specs.step import STEP_FIELDS, StepSpec, internal_name

_INTEGER_FIELDS = ("batch", "context", "warmup", "steps", "seed", "microbatches")
_NUMBER_FIELDS = ("bucket_size_mb",)
SIZE_FIELDS: tuple[str, ...] = tuple(f"model.{field.name}" for field in dataclasses.fields(TransformerShape))
FIELDS: tuple[str, ...] = ("model", *SIZE_FIELDS, *STEP_FIELDS)
"""Every field that can be set or swept."""

DEFAULT_MODEL = "tiny"


def resolve_step(fields: Mapping[str, object]) -> StepSpec:
    """Build the spec that `fields` describe; what they leave out takes its default.

    Raises UserError naming the field, what was wrong with it and what is valid; also for a field that is given and
    says how the step is spread over processes where that changes nothing.
    """
    spec = _built(fields)
    for name, why in _idle(fields, spec).items():
        raise UserError(f"{name} has no say here: {why}")
    return spec


def resolve_grid(grid: Mapping[str, Sequence[object]]) -> list[StepSpec]:
    """The product of the lists, the first field varying slowest.

    Fields that have a say in some cells alone are left out of the others, so that cells may be alike. Raises UserError
    as resolve_step does.
    """
    products = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    idle = [_idle(fields, _built(fields)) for fields in products]
    of_no_use = set(grid).intersection(*idle)
    return [
        resolve_step({name: value for name, value in fields.items() if name in of_no_use or name not in said})
        for fields, said in zip(products, idle, strict=True)
    ]


def _idle(fields: Mapping[str, object], spec: StepSpec) -> dict[str, str]:
    """Those of the fields that have no say in the step they describe, each with why."""
    return {name: why for name, why in without_a_say(spec).items() if name in fields}


def _built(fields: Mapping[str, object]) -> StepSpec:
    for name in fields:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"valid are {', '.join(FIELDS)}"
            raise UserError(f"unknown field '{name}'; {hint}")
    sizes = {name[6:]: _integer(name, value) for name, value in fields.items() if name in SIZE_FIELDS}
    step: dict[str, object] = {}
    for name, value in fields.items():
        if name == "model" or name in SIZE_FIELDS:
            continue
        step[internal_name(name)] = _value(name, value)
    return StepSpec(model=model_spec(_text("model", fields.get("model", DEFAULT_MODEL)), sizes), **step)  # type: ignore[arg-type]


def _value(name: str, value: object) -> object:
    if name in _INTEGER_FIELDS:
        return _integer(name, value)
    if name in _NUMBER_FIELDS:
        return _number(name, value)
    if name == "layout":
        return value if isinstance(value, Layout) else parse_layout(_text(name, value))
    return _text(name, value)


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return float(value)
    except ValueError:
        pass  # the message below covers it
    raise UserError(f"{name} must be a number, not '{value}'")


def _integer(name: str, value: object) -> int:
    try:
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass  # the message below covers it
    raise UserError(f"{name} must be a whole number, not '{value}'")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UserError(f"{name} must be a name, not {value!r}")
    return value
