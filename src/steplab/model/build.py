"""Builds a Workload from a ModelSpec; the only place that knows the three kinds of model."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from steplab.model.workload import Workload, random_tokens
from steplab.ops.attention.api import attention_named
from steplab.ops.attention.choice import device_name
from steplab.ops.attention.plain import Span, no_span
from steplab.ops.cross_entropy.api import linear_cross_entropy
from steplab.ops.cross_entropy.implementations import implementation
from steplab.specs.attention_kernels import chosen_by_auto
from steplab.specs.model import refuse_planning_only
from steplab.specs.step import StepSpec


def build_workload(spec: StepSpec, device: torch.device, *, span: Span = no_span) -> Workload:
    """Build the spec's model on the device, with random weights from the spec's seed.

    `span` marks for a profiler what a built-in model computes outside of any module: the parts of plain attention, and
    the loss. Raises Unsupported for a planning-only size, and UserError for a factory or configuration that cannot be
    used.
    """
    torch.manual_seed(spec.seed)
    if spec.model.kind == "hf":
        from steplab.model.hf import build_hf

        return build_hf(spec, device)
    if spec.model.kind == "factory":
        from steplab.model.factory import build_factory

        return build_factory(spec, device)
    return _build_transformer(spec, device, span)


def _build_transformer(spec: StepSpec, device: torch.device, span: Span) -> Workload:
    from steplab.model.checkpointing import block_caller
    from steplab.model.transformer import Transformer

    shape = spec.model.shape
    assert shape is not None
    refuse_planning_only(spec.model)
    choice = chosen_by_auto(spec, shape, device_name(device)) if spec.attention == "auto" else None
    attention = choice.implementation if choice else spec.attention
    with device:
        module = Transformer(
            shape,
            context=spec.context,
            attention=attention_named(attention, span=span),
            loss=cross_entropy if span is no_span else partial(_marked_loss, span),
            head_loss=partial(_head_loss, spec.loss, span) if implementation(spec.loss).in_chunks else None,
            call_block=block_caller(spec.checkpointing if spec.checkpoints_apply else "none"),
        )
    return Workload(
        module=module,
        make_batch=lambda: tuple(random_tokens(shape.vocab_size, spec.batch, spec.context, device) for _ in range(2)),
        num_layers=shape.num_layers,
        attention_width=shape.num_heads * shape.head_dim,
        notes=(f"attention auto: {choice.implementation}, {choice.reason}",) if choice else (),
    )


def _marked_loss(span: Span, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    with span("loss"):
        return cross_entropy(logits_NV, targets_N)


def _head_loss(implementation: str, span: Span, x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> Tensor:
    with span("loss"):
        return linear_cross_entropy(x_NC, weight_VC, targets_N, implementation=implementation)
