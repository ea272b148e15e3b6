"""Builds a Workload from a ModelSpec: the plain Transformer, a transformers configuration or a user's factory."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steplab.errors import Unsupported, UserError
from steplab.model.compiling import notes_on_compiling
from steplab.model.workload import Workload, random_tokens
from steplab.ops.attention.api import attention_named, device_name
from steplab.ops.attention.plain import Span, no_span
from steplab.ops.attention.triton_tuning import hopper_kernels_on
from steplab.ops.cross_entropy import linear_cross_entropy
from steplab.ops.triton_places import implementation, runs_on
from steplab.specs.attention_kernels import choice_told, chosen_by_auto
from steplab.specs.model import TransformerShape, refuse_planning_only
from steplab.specs.step import FIELDS, StepSpec

if TYPE_CHECKING:
    from steplab.model.transformer import Block


def build_workload(spec: StepSpec, device: torch.device, *, span: Span = no_span) -> Workload:
    """Build the spec's model with random weights from its seed, and the function that makes its batches.

    `span` marks computation outside of modules for a profiler: parts of plain attention, and the loss. Raises
    Unsupported for a planning-only size, and UserError for an unusable factory or configuration.
    """
    torch.manual_seed(spec.seed)
    if spec.model.kind == "hf":
        from steplab.model.hf import build_hf

        return build_hf(spec, device)
    if spec.model.kind == "factory":
        return build_factory(spec, device)
    return _build_transformer(spec, device, span)


def count_parameters(shape: TransformerShape) -> int:
    from steplab.model.transformer import Transformer

    with torch.device("meta"):
        module = Transformer(shape, context=1, attention=attention_named("plain"))
    return sum(parameter.numel() for parameter in module.parameters())


def _build_transformer(spec: StepSpec, device: torch.device, span: Span) -> Workload:
    from steplab.model.checkpointing import block_caller
    from steplab.model.transformer import Transformer

    shape = spec.model.shape
    assert shape is not None
    refuse_planning_only(spec.model)
    choice = None
    if spec.attention == "auto":
        choice = chosen_by_auto(spec, shape, device_name(device), hopper=hopper_kernels_on(device, shape.head_dim))
    attention = choice.implementation if choice else spec.attention
    with device:
        module = Transformer(
            shape,
            context=spec.context,
            attention=attention_named(attention, span=span),
            loss=cross_entropy if span is no_span else partial(_marked_loss, span),
            head_loss=partial(_head_loss, spec.loss, span) if implementation(spec.loss).in_chunks else None,
            call_block=block_caller(spec.checkpointing if spec.checkpoints_apply else "none"),
            block=_kind_of_block(spec, device),
        )
    return Workload(
        module=module,
        make_batch=lambda: tuple(random_tokens(shape.vocab_size, spec.batch, spec.context, device) for _ in range(2)),
        num_layers=shape.num_layers,
        attention_width=shape.num_heads * shape.head_dim,
        notes=(*((choice_told(choice),) if choice else ()), *(notes_on_compiling() if spec.compile != "off" else ())),
    )


def _kind_of_block(spec: StepSpec, device: torch.device) -> "type[Block] | None":
    if spec.block_ops == "plain":
        return None
    if not runs_on(device.type):
        raise Unsupported(f"block_ops triton on {device.type}", "its kernels are for CUDA", "use --block-ops plain")
    from steplab.model.fused_block import FusedBlock

    return FusedBlock


def _marked_loss(span: Span, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    with span("loss"):
        return cross_entropy(logits_NV, targets_N)


def _head_loss(implementation: str, span: Span, x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> Tensor:
    with span("loss"):
        return linear_cross_entropy(x_NC, weight_VC, targets_N, implementation=implementation)


def build_factory(spec: StepSpec, device: torch.device) -> Workload:
    """Build the workload of a user's factory, named as package.module:function.

    It is called with those arguments of `batch`, `context`, `device` and `seed` that it takes. It returns `(module,
    make_batch)` or a callable that runs one whole step. Raises UserError if it cannot be found or returns something
    else. Its own exceptions pass through.
    """
    factory = _find(spec.model.name)
    offered = {"batch": spec.batch, "context": spec.context, "device": device, "seed": spec.seed}
    own = _not_taken(factory, ("batch", "context"))
    missing = _not_taken(factory, tuple(offered))
    given = {key: value for key, value in offered.items() if key not in missing}
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        raise UserError(
            f"{spec.model.name} has parameters that steplab does not give ({error}); it gives "
            f"{', '.join(offered)}, each by its name; give the others a default"
        ) from error
    made = factory(**given)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        _only_defaults(spec, ("attention", "checkpointing"), "its factory has built the model, blocks and attention")
        return Workload(
            module=made[0].to(device), make_batch=made[1], knows_tokens=not own, notes=_unknown_tokens(spec, own)
        )
    if callable(made) and not isinstance(made, nn.Module):
        arithmetic = ("pass", "precision", "compile", "attention", "checkpointing")
        everything = (*arithmetic, "optimizer", "update", "accumulation")
        _only_defaults(spec, everything, "its factory returns a whole step, which steplab cannot divide into phases")
        return Workload(step=made, knows_tokens=not own, notes=_unknown_tokens(spec, own))
    told = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
    raise UserError(
        f"{spec.model.name} returned {f'({told})' if isinstance(made, tuple) else told}; it must return "
        "(module, make_batch), in which calling make_batch() makes one batch, or a callable that runs one step"
    )


def knows_tokens(spec: StepSpec) -> bool:
    """True if a step has batch times context tokens; False for a factory that sizes its batches itself. Raises
    UserError for a factory that cannot be found.
    """
    return spec.model.kind != "factory" or not _not_taken(_find(spec.model.name), ("batch", "context"))


def _not_taken(factory: Callable[..., Any], options: tuple[str, ...]) -> tuple[str, ...]:
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ()
    named = {parameter.name for parameter in parameters}
    return tuple(option for option in options if option not in named)


def _unknown_tokens(spec: StepSpec, own: tuple[str, ...]) -> tuple[str, ...]:
    if not own:
        return ()
    lacking = " and ".join(own)
    return (
        f"tokens per second: {spec.model.name} does not take {lacking}, so the tokens of its batches are not known",
    )


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last: a file in it may have the name of one of Python's modules
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
    """Raise Unsupported for an option that cannot apply and is not at its default, so that no record claims it."""
    for option in options:
        value = FIELDS[option].read(spec)
        if value != FIELDS[option].default:
            raise Unsupported(f"{option} {value} for {spec.model.name}", why, "apply it in the factory itself")
