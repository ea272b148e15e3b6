"""Adds a branch to a residual stream and takes the RMSNorm of the sum in one kernel; returns both.

The backward pass reads the rows once: it adds the sum's gradient to the norm's, and writes both inputs' gradients in
their dtypes. Saved for it are the sum, the weight and one number for each row.
"""

from typing import Any

import torch
from torch import Tensor

from .errors import UserError
from .torch_library import define, define_derivative, define_with_amax
from .triton_device import on_device_of, refuse_second_derivative, refuse_unserved
from .triton_places import NUM_PROGRAMS, power_of_two


def plain_add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The reference: (s / sqrt(mean(s^2) + eps) * weight, s) with s = x + branch, over the last dimension (Zhang and
    Sennrich 2019)."""
    total = x + branch
    return total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight, total


FORWARD_WARPS, BACKWARD_WARPS = 8, 8
SHARES, COLUMNS = 64, 16
_INSTEAD = "use steplab.ops.rms_norm.plain_add_rms_norm"


def add_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(normed, sum) for x and branch [..., C] and weight [C]: sum = x + branch, normed = its RMSNorm in `dtype`.

    The sum has the wider dtype of x and branch, as in torch; `dtype` defaults to it. Computed in float32 and rounded
    once.

    For float32, bfloat16 and float16 on CUDA (or on a CPU under TRITON_INTERPRET=1). Raises UserError for shapes that
    differ, Unsupported for other dtypes and devices.
    """
    wide = _checked(x, branch, weight)
    normed, total, _ = torch.ops.steplab.add_rms_norm(x, branch, weight, eps, dtype or wide)
    return normed, total


def add_rms_norm_amax(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As add_rms_norm, and normed's largest magnitude: a float32 scalar on the device without a gradient, NaN if any
    element is.
    """
    wide = _checked(x, branch, weight)
    normed, total, _, amax = torch.ops.steplab.add_rms_norm_amax(x, branch, weight, eps, dtype or wide)
    return normed, total, amax


def _checked(x: Tensor, branch: Tensor, weight: Tensor) -> torch.dtype:
    if x.dim() == 0 or x.shape != branch.shape or weight.shape != x.shape[-1:]:
        shapes = f"{list(x.shape)}, {list(branch.shape)} and {list(weight.shape)}"
        raise UserError(f"add_rms_norm takes two tensors [..., C] and a weight [C], not {shapes}")
    for tensor in (x, branch, weight):
        refuse_unserved("add_rms_norm", tensor, _INSTEAD)
    return torch.promote_types(x.dtype, branch.dtype)


def _forward(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    from .block_kernels import add_rms_norm_kernel

    x, branch = x.contiguous(), branch.contiguous()
    normed, total, rstd = _fake_forward(x, branch, weight, eps, dtype)
    if x.numel():
        with on_device_of(x):
            add_rms_norm_kernel[(rstd.numel(),)](
                x, branch, weight.contiguous(), normed, total, rstd, amax, x.shape[-1], eps,
                BLOCK=power_of_two(x.shape[-1]), enable_fp_fusion=True, num_warps=FORWARD_WARPS,
            )  # fmt: skip
    return normed, total, rstd


def _backward(
    grad: Tensor, grad_sum: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor, *dtypes: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    from .block_kernels import add_rms_norm_backward_kernel, rms_norm_weight_kernel

    grad, total = grad.contiguous(), total.contiguous()
    grad_x, grad_branch, grad_weight = _fake_backward(grad, grad_sum, total, weight, rstd, *dtypes)
    width = total.shape[-1]
    if not total.numel():
        return grad_x, grad_branch, grad_weight.zero_()
    num_programs = min(rstd.numel(), NUM_PROGRAMS)
    shares = torch.empty(num_programs, width, dtype=torch.float32, device=total.device)
    with on_device_of(total):
        add_rms_norm_backward_kernel[(num_programs,)](
            grad, total if grad_sum is None else grad_sum.contiguous(), total, weight.contiguous(), rstd, grad_x,
            grad_branch, shares, rstd.numel(), width, HAS_SUM=grad_sum is not None, HAS_BRANCH=grad_branch.numel() > 0,
            BLOCK=power_of_two(width), enable_fp_fusion=True, num_warps=BACKWARD_WARPS,
        )  # fmt: skip
        rms_norm_weight_kernel[(-(-width // COLUMNS),)](
            shares, grad_weight, num_programs, width, ROWS=SHARES, COLUMNS=COLUMNS, enable_fp_fusion=True, num_warps=4
        )
    return grad_x, grad_branch, grad_weight


def _fake_forward(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, branch.dtype)
    normed, total = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=wide)
    return normed, total, x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_backward(
    grad: Tensor, grad_sum: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor, *dtypes: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The branch's gradient is empty if it equals x's to the bit; the caller then takes x's."""
    of_x, of_branch = dtypes
    grad_x = total.new_empty(total.shape, dtype=of_x)
    grad_branch = total.new_empty(total.shape if of_branch != of_x else 0, dtype=of_branch)
    return grad_x, grad_branch, weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, weight, _, _ = inputs
    _, total, rstd, *amax = output
    ctx.dtypes = x.dtype, branch.dtype
    ctx.mark_non_differentiable(rstd, *amax)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, weight, rstd)


def _differentiate(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative("add_rms_norm", _INSTEAD)
    total, weight, rstd = ctx.saved_tensors
    if grad is None:  # nothing reads the norm
        assert grad_sum is not None
        return *(grad_sum.to(dtype) for dtype in ctx.dtypes), None, None, None
    of_x, of_branch, of_weight = torch.ops.steplab.add_rms_norm_backward(
        grad, grad_sum, total, weight, rstd, *ctx.dtypes
    )
    return of_x, of_branch if of_branch.numel() else of_x, of_weight, None, None


_ARGUMENTS = "(Tensor x, Tensor branch, Tensor weight, float eps, ScalarType dtype)"
define_with_amax("add_rms_norm", _ARGUMENTS, 3, _forward, _fake_forward)
define(
    "add_rms_norm_backward",
    "(Tensor grad, Tensor? grad_sum, Tensor total, Tensor weight, Tensor rstd, ScalarType of_x, "
    "ScalarType of_branch) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
for name in ("add_rms_norm", "add_rms_norm_amax"):
    define_derivative(name, _differentiate, _save)
