"""Where Triton's kernels run: on CUDA, and on a CPU under Triton's interpreter, which is slow and for tests. It imports
nothing of torch, so that it can be asked before there is a step."""

import os


def runs_on(device_type: str) -> bool:
    """Whether Triton's kernels run on such a device."""
    return device_type == "cuda" or (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
