"""Predict the memory of a step of any model."""

import importlib.util
from dataclasses import replace
from functools import partial

from steplab.errors import Unsupported
from steplab.plan.dry_run.events import Operator
from steplab.plan.memory import predict_memory
from steplab.records.prediction import MemoryPrediction
from steplab.specs.ddp import Variant
from steplab.specs.hardware import HardwareSpec
from steplab.specs.hf_shape import shape_of
from steplab.specs.model import ModelSpec
from steplab.specs.resolve import options
from steplab.specs.step import StepSpec


def memory_of(
    spec: StepSpec,
    variant: Variant | None = None,
    *,
    gpu: HardwareSpec | None = None,
    sequence_parallel: bool = True,
    operators: list[Operator] | None = None,
) -> MemoryPrediction:
    """Predict the memory of any model; one that is not steplab's own is traced where that is possible, and `operators`
    gets the operators of the traced step. On a layout a configuration is the Transformer with its parts.

    gpu: the GPU whose cuBLAS workspace is counted; None: a Hopper.
    """
    device = gpu.device_names[0] if gpu and gpu.device_names else None
    if spec.layout.world_size > 1 and spec.model.kind == "hf":
        known = replace(spec, model=splittable(spec.model))
        found = predict_memory(known, device=device, variant=variant, sequence_parallel=sequence_parallel)
        return replace(found, spec=spec, notes=(planned_as(spec.model), *found.notes))
    simple = spec.compile == "off" and spec.layout.world_size == 1
    if is_traced(spec) and (simple or spec.model.kind == "factory"):
        from steplab.fake_step.step import fake_step, telling_operators

        traced = fake_step if operators is None else partial(telling_operators, operators)
        return predict_memory(spec, device=device, open_step=traced)
    return predict_memory(spec, device=device, variant=variant, sequence_parallel=sequence_parallel)


def splittable(model: ModelSpec) -> ModelSpec:
    """The model whose split over ranks is known: a built-in one, or the one with the parts of a configuration. Raises
    Unsupported for another."""
    doing = f"planning layouts of {model.label}"
    shape = shape_of(model, doing)
    if not shape.num_heads:
        why = "it is a size for planning only, which no layout can split"
        raise Unsupported(doing, why, "use `steplab plan accounting`")
    return model if model.shape else ModelSpec(name="small", kind="transformer", shape=shape)


def planned_as(model: ModelSpec) -> str:
    """The note that a configuration is planned as the Transformer with its parts."""
    built_in = replace(splittable(model), name="small")
    return (
        f"{model.label} is planned as steplab's Transformer with the same parts; of a transformers model "
        "`steplab run` takes layouts of dp and fsdp, and of that Transformer all of them, as "
        f"{options(StepSpec(model=built_in))}"
    )


def is_traced(spec: StepSpec) -> bool:
    """Whether the operators of the model are known by running it on tensors without content, which needs torch."""
    needed = {"hf": ("torch", "transformers"), "factory": ("torch",)}.get(spec.model.kind, ())
    return bool(needed) and all(importlib.util.find_spec(name) is not None for name in needed)
