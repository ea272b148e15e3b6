"""Where Triton's kernels run: on CUDA, and on a CPU under Triton's interpreter, which is for tests."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from steplab.errors import Unsupported


def runs_on(device_type: str) -> bool:
    """Whether Triton's kernels run on such a device."""
    return device_type == "cuda" or (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def refuse_unserved(what: str, x: Tensor, instead: str) -> None:
    """Raise Unsupported for a tensor that a kernel computing in float32 does not serve."""
    if x.dtype == torch.float64:
        raise Unsupported(f"{what} in float64", "its kernel computes in float32", instead)
    if not runs_on(x.device.type):
        raise Unsupported(f"{what} on {x.device.type}", "its kernel is for CUDA", instead)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current device, whatever the tensors' is."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
