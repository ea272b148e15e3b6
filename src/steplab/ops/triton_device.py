"""Refuses tensors that Triton's kernels do not support, and selects the device on which kernels start."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import Unsupported
from .triton_places import runs_on

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuse_unserved(what: str, x: Tensor, instead: str) -> None:
    """Raise Unsupported for a tensor that a kernel computing in float32 does not support, and under forward-mode
    differentiation or torch.func.
    """
    if x.dtype not in DTYPES:
        shown = str(x.dtype).removeprefix("torch.")
        raise Unsupported(f"{what} in {shown}", "its kernel serves float32, bfloat16 and float16", instead)
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        raise Unsupported(f"forward-mode differentiation of {what}", "its kernel has none", instead)
    refuse_func_grad(what, instead)
    if not runs_on(x.device.type):
        raise Unsupported(f"{what} on {x.device.type}", "its kernel is for CUDA", instead)


def refuse_func_grad(what: str, instead: str) -> None:
    """Raise Unsupported within torch.func.grad, vjp and jacrev. torch's own error names a class that the caller never
    wrote.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    levels = torch._C._functorch.get_interpreter_stack() or []
    if any(level.key() == torch._C._functorch.TransformType.Grad for level in levels):
        why = "its backward pass is autograd's alone (loss.backward(), torch.autograd.grad)"
        raise Unsupported(f"torch.func.grad of {what}", why, instead)


def refuse_second_derivative(what: str, instead: str) -> None:
    """Raise Unsupported in a backward pass that will be differentiated. torch would take the missing second derivative
    for zero.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise Unsupported(f"the second derivative of {what}", "its backward pass has none", instead)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Context that makes x's GPU current, because Triton starts kernels on the current device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
