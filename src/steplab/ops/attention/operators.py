"""FlashAttention-2 forward and backward as operators of torch: steplab::flash_reference_* and steplab::flash_triton_*.

An operator is what torch.compile, FLOP counters, profilers and selective checkpointing see of a function, and do not
look into. All take [B, H, S, D] of any strides. The output is laid out as the queries are, a gradient as its tensor
is; log-sum-exp is contiguous [B, H, S], float32 (float64 for float64). They have no derivative of their own: that is
functions.py.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import Library, register_fake

from steplab.errors import Unsupported
from steplab.ops.attention.flash_reference import reference_backward, reference_forward
from steplab.ops.attention.flops import register_formulas
from steplab.ops.attention.shapes import refuse_unserved
from steplab.ops.attention.triton_backward import triton_backward
from steplab.ops.attention.triton_forward import triton_forward

# Defined by Library and not by torch.library.custom_op, whose wrapper takes longer than some of these kernels.
_library = Library("steplab", "FRAGMENT")
_FORWARD = "(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, slots=True)
class Operators:
    """A forward and its backward."""

    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    """(q, k, v, causal, scale) -> (o, lse)"""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]
    """(do, q, k, v, o, lse, causal, scale) -> (dq, dk, dv)"""


def _define(name: str, forward: Callable[..., object], backward: Callable[..., object]) -> Operators:
    for pass_name, schema, real, fake in (
        ("forward", _FORWARD, forward, _fake_forward),
        ("backward", _BACKWARD, backward, _fake_backward),
    ):
        operator = f"{name}_{pass_name}"
        _library.define(operator + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(operator, real, "CompositeExplicitAutograd")
        register_fake(f"steplab::{operator}", fake, lib=_library)
    packets = [getattr(torch.ops.steplab, f"{name}_{pass_name}") for pass_name in ("forward", "backward")]
    register_formulas(*packets)
    return Operators(*(packet.default for packet in packets))


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), torch.empty(q.shape[:-1], dtype=wide, device=q.device)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):  # it would round the wide sums
        return reference_forward(q, k, v, causal=causal, scale=scale)


def _reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        return reference_backward(grad, q, k, v, o, lse, causal=causal, scale=scale)


def _triton_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        return triton_forward(q, k, v, causal=causal, scale=scale)
    _refuse_without_interpreter(q, k, causal)
    if _interpreter_lacks(q):
        o, lse = triton_forward(q.float(), k.float(), v.float(), causal=causal, scale=scale)
        return o.to(q.dtype), lse
    return triton_forward(q, k, v, causal=causal, scale=scale)


def _triton_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if _interpreter_lacks(q):
        wide = (grad.float(), q.float(), k.float(), v.float(), o.float())
        dq, dk, dv = triton_backward(*wide, lse, causal=causal, scale=scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    return triton_backward(grad, q, k, v, o, lse, causal=causal, scale=scale)


def _interpreter_lacks(q: Tensor) -> bool:
    """Triton's interpreter, which is what runs on a CPU, multiplies the bits of bfloat16 as integers."""
    return q.is_cpu and q.dtype == torch.bfloat16


def _refuse_without_interpreter(q: Tensor, k: Tensor, causal: bool) -> None:
    refuse_unserved("flash_triton", q, k, causal=causal, device="cuda" if q.is_cpu else None)
    if q.is_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise Unsupported(
            "attention 'flash_triton' on a CPU",
            "it needs TRITON_INTERPRET=1 in the environment (slow, for tests)",
            "choose sdpa or flash_reference",
        )


REFERENCE = _define("flash_reference", _reference_forward, _reference_backward)
TRITON = _define("flash_triton", _triton_forward, _triton_backward)
