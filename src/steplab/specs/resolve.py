"""Converts a user's fields (`{"model": "small", "context": 256}`) to a StepSpec, and a StepSpec to options.

Command line, study files and Python share it, and so its errors.
"""

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from steplab.errors import UserError
from steplab.specs.model import MODEL_SIZES, SIZE_FIELDS, model_spec
from steplab.specs.step import FIELDS, STEP_FIELDS, StepSpec
from steplab.specs.step_choices import DEFAULT_MODEL, KEEPS_MASTERS, WITH_MASTERS
from steplab.specs.step_fields import option_name, parse_declared

Grid = Mapping[str, Sequence[object]]
Cell = TypeVar("Cell")


def resolve_step(fields: Mapping[str, object]) -> StepSpec:
    """StepSpec with these fields, and defaults. Raises UserError for an invalid field, with the valid values, and for
    one without effect on this step."""
    spec = _built(fields)
    for name, why in _unused(fields, spec).items():
        raise UserError(f"{name} has no effect here: {why}")
    return spec


def as_grid(fields: Mapping[str, object]) -> dict[str, list[object]]:
    return {name: list(value) if isinstance(value, (list, tuple)) else [value] for name, value in fields.items()}


def products(grid: Grid) -> list[dict[str, object]]:
    """All combinations; the first field varies slowest."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def cells_of_grids(grids: Iterable[Grid], resolve: Callable[[Grid], Iterable[Cell]]) -> tuple[Cell, ...]:
    """Cells of all grids in order, without duplicates."""
    return tuple(dict.fromkeys(cell for grid in grids for cell in resolve(grid)))


def resolve_grid(grid: Grid) -> list[StepSpec]:
    """Steps for all combinations of values; the first field varies slowest. Combinations omit fields without effect, so
    steps may repeat. Raises UserError as resolve_step."""
    every = products(grid)
    unused = [_unused(fields, _built(fields)) for fields in every]
    of_no_use = set(grid).intersection(*unused)
    return [
        resolve_step({name: value for name, value in fields.items() if name in of_no_use or name not in without})
        for fields, without in zip(every, unused, strict=True)
    ]


def with_fields(spec: StepSpec, fields: Mapping[str, str]) -> StepSpec:
    """Copy with changed fields, named as in study files. Raises UserError for an invalid value, and Unsupported for an
    unsupported step."""
    parsed = parse_declared(fields, FIELDS)
    sizes: dict[str, Any] = {FIELDS[n].attribute: each for n, each in parsed.items() if n.startswith("model.")}
    changes = {FIELDS[n].attribute: each for n, each in parsed.items() if not n.startswith("model.")}
    if "model" in fields:
        changes["model"] = model_spec(fields["model"], {})
    if sizes and spec.model.shape is not None:
        shape = dataclasses.replace(spec.model.shape, **sizes)
        changes["model"] = dataclasses.replace(spec.model, shape=shape)
    return dataclasses.replace(spec, **changes)


def command(spec: StepSpec, changes: Mapping[str, str] = MappingProxyType({})) -> str:
    """Command that measures this step, without default options. `changes` set further options."""
    return f"steplab run {options(spec, changes)}"


def options(spec: StepSpec, changes: Mapping[str, str] = MappingProxyType({})) -> str:
    values = {"model": spec.model.name}
    base = MODEL_SIZES.get(spec.model.name)
    for field in (*SIZE_FIELDS, *STEP_FIELDS):
        default = getattr(base, field.attribute, None) if field in SIZE_FIELDS else field.default
        if field.key != "model" and field.read(spec) != default:
            values[field.key] = str(field.read(spec))
    values |= changes
    return " ".join(f"{option_name(name)} {shlex.quote(value)}" for name, value in values.items())


def _unused(fields: Mapping[str, object], spec: StepSpec) -> dict[str, str]:
    return {name: why for name in fields if (why := FIELDS[name].unused(spec))}


def _built(fields: Mapping[str, object]) -> StepSpec:
    given = parse_declared(fields, FIELDS)
    sizes = {field.attribute: given[field.key] for field in SIZE_FIELDS if field.key in given}
    step = {field.attribute: given[field.key] for field in STEP_FIELDS if field.key in given}
    if step.get("precision") in WITH_MASTERS and step.get("pass_name", "train") == "train":
        step.setdefault("optimizer", KEEPS_MASTERS)
    step["model"] = model_spec(str(step.get("model", DEFAULT_MODEL)), sizes)
    return StepSpec(**step)
