"""Plan for hardware that one does not have: predictions, which need neither torch nor a GPU."""

from steplab.lab.measuring import asked_step
from steplab.plan.memory import predict_memory
from steplab.records.prediction import MemoryPrediction
from steplab.specs.step import StepSpec


def plan_memory(spec: StepSpec | str | None = None, **fields: object) -> MemoryPrediction:
    """What a step's peak of memory will be made of, on CUDA.

    `spec` and `fields` are as in `measure`:

        plan_memory("2.7b", context=512, precision="bf16").peak_bytes

    Raises UserError for a request that makes no step, Unsupported for a step whose memory is not known.
    """
    return predict_memory(asked_step("plan_memory", spec, fields))
