"""The user's own model, named as package.module:function.

The function is called with those of `batch`, `context`, `device` and `seed` that it takes, and returns either `(module,
make_batch)` or a callable that runs one whole step.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from steplab.errors import Unsupported, UserError
from steplab.model.workload import Workload
from steplab.specs.step import FIELDS, StepSpec


def build_factory(spec: StepSpec, device: torch.device) -> Workload:
    """Call the user's factory. Raises UserError if it cannot be found or returns something else.

    Exceptions of the factory itself pass through to the user.
    """
    factory = _find(spec.model.name)
    offered = {"batch": spec.batch, "context": spec.context, "device": device, "seed": spec.seed}
    parameters = inspect.signature(factory).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters}
    made = factory(**{key: value for key, value in offered.items() if takes_any or key in named})
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        _only_defaults(spec, ("attention", "checkpointing"), "its factory has built the model, blocks and attention")
        return Workload(module=made[0].to(device), make_batch=made[1])
    if callable(made) and not isinstance(made, nn.Module):
        arithmetic = ("pass", "precision", "compile", "attention", "checkpointing")
        everything = (*arithmetic, "optimizer", "update", "accumulation")
        _only_defaults(spec, everything, "its factory returns a whole step, which steplab cannot divide into phases")
        return Workload(step=made)
    raise UserError(
        f"{spec.model.name} returned {type(made).__name__}; "
        "it must return (module, make_batch), or a callable that runs one step"
    )


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"cannot import {error.name} for model {name}; run from the folder that holds it, or install it"
        ) from error
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise UserError(f"{module_name} has no function {function_name}; write the model as package.module:function")
    return factory


def _only_defaults(spec: StepSpec, options: tuple[str, ...], why: str) -> None:
    """Raise Unsupported for an option that steplab cannot apply, so that no record claims it was applied."""
    for option in options:
        value = FIELDS[option].read(spec)
        if value != FIELDS[option].default:
            raise Unsupported(f"{option} {value} for {spec.model.name}", why, "apply it in the factory itself")
