"""Predict the memory of a step of any model."""

import importlib.util
from functools import partial

from steplab.plan.dry_run.events import Operator
from steplab.plan.memory import predict_memory
from steplab.records.prediction import MemoryPrediction
from steplab.specs.ddp import Variant
from steplab.specs.hardware import HardwareSpec
from steplab.specs.hf_shape import refuse_experts
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
    simple = spec.compile == "off" and spec.layout.world_size == 1
    if is_traced(spec) and (simple or spec.model.kind == "factory"):
        from steplab.fake_step.step import fake_step, telling_operators

        traced = fake_step if operators is None else partial(telling_operators, operators)
        return predict_memory(spec, device=device, open_step=traced)
    return predict_memory(spec, device=device, variant=variant, sequence_parallel=sequence_parallel)


def is_traced(spec: StepSpec) -> bool:
    """Whether the operators of the model are known by running it on tensors without content, which needs torch. Raises
    Unsupported for a mixture of experts."""
    needed = {"hf": ("torch", "transformers"), "factory": ("torch",)}.get(spec.model.kind, ())
    refuse_experts(spec.model, f"a prediction for {spec.model.label}")
    return bool(needed) and all(importlib.util.find_spec(name) is not None for name in needed)
