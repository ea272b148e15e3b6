"""Predict the memory of a step for hardware that is not at hand; this needs neither torch nor a GPU."""

from steplab.lab.measuring import asked_step
from steplab.plan.memory import predict_memory
from steplab.records.prediction import MemoryPrediction
from steplab.specs.step import StepSpec


def plan_memory(spec: StepSpec | str | None = None, **fields: object) -> MemoryPrediction:
    """The predicted memory peak of a step on CUDA, by category.

    `spec` and `fields` are as in `measure`:

        plan_memory("2.7b", context=512, precision="bf16").peak_bytes

    Raises UserError for an invalid request, Unsupported for a step whose memory cannot be predicted.
    """
    return predict_memory(asked_step("plan_memory", spec, fields))
