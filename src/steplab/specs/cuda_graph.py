"""Which steps can be replayed as CUDA graphs. It imports nothing of the specs, which ask here."""

from steplab.errors import Unsupported

RECORD_THEIR_OWN = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record the model's launches as CUDA graphs and replay them."""
_OFF = "or --cuda-graph off"


def refuse_unserved_graph(device: str) -> None:
    """Raise Unsupported for a device without CUDA graphs, by its name or kind. `auto` passes: what it will be is not
    known."""
    kind = device.partition(":")[0]
    if kind in ("cpu", "mps"):
        why = "CUDA graphs are recorded and replayed by a CUDA GPU"
        raise Unsupported(f"cuda_graph step on {kind}", why, "use --cuda-graph off, or --device cuda")


def refuse_unrecorded_step(*, compile: str, precision: str, num_processes: int) -> None:
    """Raise Unsupported for a step that cannot be recorded as CUDA graphs."""
    if compile in RECORD_THEIR_OWN:
        why = "that mode records CUDA graphs of its own"
        raise Unsupported(
            f"cuda_graph step with compile {compile}", why, f"use --compile block, default or off, {_OFF}"
        )
    if precision == "fp16":
        why = "its gradient scaler waits for the GPU in each step to look for overflows"
        raise Unsupported("cuda_graph step with precision fp16", why, f"use --precision bf16, {_OFF}")
    if num_processes > 1:
        why = "steplab does not record communication between processes"
        raise Unsupported(f"cuda_graph step with {num_processes} processes", why, f"use one process, {_OFF}")
