"""What replays CUDA graphs."""

from steplab.errors import Unsupported

RECORD_THEIR_OWN = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record the model's launches as CUDA graphs and replay them."""


def refuse_unserved_graph(device: str) -> None:
    """Raise Unsupported for a device without CUDA graphs, by its name or kind. `auto` passes: what it will be is not
    known."""
    kind = device.partition(":")[0]
    if kind in ("cpu", "mps"):
        why = "CUDA graphs are recorded and replayed by a CUDA GPU"
        raise Unsupported(f"cuda_graph step on {kind}", why, "use --cuda-graph off, or --device cuda")
