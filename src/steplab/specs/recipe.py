"""The recipe `fast`: fields of a step that made it faster where that was measured, set where they are not given."""

from collections.abc import Callable, Mapping
from typing import get_args

from steplab.errors import Remark, Unsupported, UserError, warn_caller
from steplab.specs.changes import CHANGES, DeviceKind
from steplab.specs.resolve import resolve_step, with_fields
from steplab.specs.step import StepSpec
from steplab.specs.step_fields import option_name

RECIPE = "recipe"
"""Name of the request among the fields of a step; it is none, because a spec has what it sets."""
RECIPES = ("fast",)
_MEASURED_ON = {"cuda": "an H200", "cpu": "a CPU"}
"""Where the fields that are set were measured, by kind of device."""


def resolve_with_recipe(fields: Mapping[str, object], device_kind: Callable[[str], str]) -> StepSpec:
    """Build the spec that `fields` describe, as resolve_step does, with what a recipe among them adds.

    `device_kind` gives the kind of device behind a name, such as `auto`; it is asked only for a recipe. A Remark says
    what was set, and what could not be. Raises UserError as resolve_step does, and for an unknown recipe.
    """
    given = dict(fields)
    name = given.pop(RECIPE, None)
    spec = resolve_step(given)
    if name is None:
        return spec
    if name not in RECIPES:
        raise UserError(f"recipe '{name}' is not known; choose one of {', '.join(RECIPES)}")
    kind = device_kind(spec.device)
    added, numerics, refused = dict[str, str](), dict[str, None](), list[str]()
    for change in CHANGES:
        if change.field in given or not change.is_fast(spec, kind) or not change.matters(spec):
            continue
        option = f"{option_name(change.field)} {change.value}"
        try:
            spec = with_fields(spec, {change.field: change.value})
        except Unsupported as error:
            refused.append(f"{option} is left out: {error.why}")
        else:
            added[change.field] = option  # a later row of a field takes the place of an earlier one
            if change.numerics:
                numerics[change.field] = None
    sets = "sets nothing"
    if added:
        sets = f"sets {' '.join(added.values())}, which made steps faster on {_MEASURED_ON[kind]}"
    changing = [f"{added[field]} changes the numbers" for field in numerics]
    warn_caller(Remark("; ".join([f"recipe {name} on {kind} {sets}", *changing, *refused])))
    return spec


def recipe_help() -> str:
    """Help of the option --recipe: what it sets for a built-in model on each kind of device."""
    of_kinds = []
    for kind in get_args(DeviceKind):
        values = dict[str, list[str]]()
        for change in CHANGES:
            if "transformer" in change.fast.get(kind, ()):
                values[change.field] = [change.value, *values.get(change.field, [])]
        words = [f"{option_name(field)} {' or '.join(those)}" for field, those in values.items()]
        if words:
            of_kinds.append(f"on {kind} {', '.join(words)}")
    return f"Set what the other options leave open: fast ({'; '.join(of_kinds)})"
