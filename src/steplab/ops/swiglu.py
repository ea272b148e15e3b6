"""SwiGLU's silu(gate) * up, where gate and up are halves of one tensor, and so are their gradients.

Only that tensor is saved for backward. torch.compile, FLOP counters, profilers and checkpointing see the operators
steplab::swiglu and its backward, and do not look into them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from .errors import UserError
from .torch_library import define_derivative, define_with_amax
from .triton_device import on_device_of, refuse_second_derivative, refuse_unserved


def plain_swiglu(gate_up: Tensor) -> Tensor:
    """The reference in the input's precision, as the formula reads (Shazeer 2020, "GLU Variants Improve
    Transformer").
    """
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


ROWS, COLUMNS, NUM_WARPS = 2, 512, 4
_INSTEAD = "use steplab.ops.swiglu.plain_swiglu"


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [..., F] for gate_up [..., 2F] with the gate first, in the same dtype.

    Computed in float32, rounded once; for float32, bfloat16 and float16 on CUDA (CPU: TRITON_INTERPRET=1). Raises
    UserError for an odd last dimension, Unsupported for other dtypes and devices.
    """
    _refuse(gate_up)
    output: Tensor = torch.ops.steplab.swiglu(gate_up)
    return output


def swiglu_amax(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """As swiglu without a derivative, and the result's largest magnitude: a float32 scalar on the device, NaN if any
    element is.
    """
    _refuse(gate_up)
    output, amax = torch.ops.steplab.swiglu_amax(gate_up)
    return output, amax


def swiglu_backward_amax(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of gate_up [..., 2F] from the output's gradient [..., F], and its amax as in swiglu_amax."""
    gradient, amax = torch.ops.steplab.swiglu_backward_amax(grad, gate_up)
    return gradient, amax


def _refuse(gate_up: Tensor) -> None:
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise UserError(f"swiglu takes a gate and an up of equal widths side by side, not {list(gate_up.shape)}")
    refuse_unserved("swiglu", gate_up, _INSTEAD)


def _forward(gate_up: Tensor, amax: Tensor | None = None) -> Tensor:
    from .block_kernels import swiglu_kernel

    gate_up = gate_up.contiguous()
    out = _fake_forward(gate_up)
    width = out.shape[-1]
    num_rows = out.numel() // max(width, 1)
    if out.numel():
        with on_device_of(out):
            swiglu_kernel[_grid(num_rows, width)](
                gate_up, out, amax, num_rows, width,
                ROWS=ROWS, COLUMNS=COLUMNS, enable_fp_fusion=True, num_warps=NUM_WARPS,
            )  # fmt: skip
    return out


def _backward(grad: Tensor, gate_up: Tensor, amax: Tensor | None = None) -> Tensor:
    from .block_kernels import swiglu_backward_kernel

    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    grad_joined = torch.empty_like(gate_up)
    width = grad.shape[-1]
    num_rows = grad.numel() // max(width, 1)
    if grad.numel():
        with on_device_of(grad):
            swiglu_backward_kernel[_grid(num_rows, width)](
                grad, gate_up, grad_joined, amax, num_rows, width,
                ROWS=ROWS, COLUMNS=COLUMNS, enable_fp_fusion=True, num_warps=NUM_WARPS,
            )  # fmt: skip
    return grad_joined


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return -(-num_rows // ROWS), -(-width // COLUMNS)


def _fake_forward(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _fake_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> Tensor:
    refuse_second_derivative("swiglu", _INSTEAD)
    (gate_up,) = ctx.saved_tensors
    gradient: Tensor = torch.ops.steplab.swiglu_backward(grad, gate_up)
    return gradient


define_with_amax("swiglu", "(Tensor gate_up)", 1, _forward, _fake_forward)
define_with_amax("swiglu_backward", "(Tensor grad, Tensor gate_up)", 1, _backward, _fake_backward)
define_derivative("swiglu", _differentiate, _save)
