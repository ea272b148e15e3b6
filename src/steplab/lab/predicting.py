"""Predict the memory of a step of any model."""

import importlib.util
from functools import partial

from steplab.plan.dry_run.events import Operator
from steplab.plan.layout.model import SpreadModel
from steplab.plan.memory import predict_memory
from steplab.records.prediction import MemoryPrediction
from steplab.specs.ddp import Variant
from steplab.specs.hardware import HardwareSpec
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
    gets the operators of the traced step.

    gpu: the GPU whose cuBLAS workspace is counted; None: a Hopper.
    """
    device = gpu.device_names[0] if gpu and gpu.device_names else None
    if is_traced(spec) and spec.layout.world_size > 1:
        return predict_memory(spec, device=device, variant=variant, model=spread_model(spec))
    if is_traced(spec):
        from steplab.fake_step.step import fake_step, telling_operators

        if spec.compile != "off":
            traced = partial(fake_step, compiled=True)  # its operators are told by an eager step
        else:
            traced = fake_step if operators is None else partial(telling_operators, operators)
        return predict_memory(spec, device=device, open_step=traced)
    return predict_memory(spec, device=device, variant=variant, sequence_parallel=sequence_parallel)


def spread_model(spec: StepSpec) -> SpreadModel | None:
    """The model as layouts spread it, where it is not steplab's own: by a trace, which takes seconds."""
    if not is_traced(spec):
        return None
    from steplab.fake_step.spread import foreign_model

    return foreign_model(spec)


def is_traced(spec: StepSpec) -> bool:
    """Whether the operators of the model are known by running it on tensors without content, which needs torch."""
    needed = {"hf": ("torch", "transformers"), "factory": ("torch",)}.get(spec.model.kind, ())
    return bool(needed) and all(importlib.util.find_spec(name) is not None for name in needed)
