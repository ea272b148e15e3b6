"""FlashAttention-2 forward and backward as operators of torch: steplab::flash_reference_* and steplab::flash_triton_*.

All take [B, H, S, D] of any strides. The output is laid out as q, a gradient as its tensor. log-sum-exp is contiguous
[B, H, S], float32 (float64 for float64). Their derivative is in functions.py.

FLOPs count a multiply-add as two, over unmasked pairs of a query and a key; torch's fused operators count all pairs.
Forward has 4 D a pair (S = Q K^T, O = P V). Backward has 10 D (S again, dP, dV, dQ and dK; Dao 2023,
"FlashAttention-2", section 4.1), even in kernels that make S and dP twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

from ..errors import Unsupported
from ..torch_library import define
from ..triton_places import runs_on
from .flash_reference import reference_backward, reference_forward
from .shapes import refuse_unserved
from .triton_backward import triton_backward
from .triton_forward import triton_forward


def num_pairs(num_queries: int, num_keys: int, *, causal: bool) -> int:
    """Number of (query, key) pairs that are not masked. If causal, query i (from 0) sees keys 0 to i."""
    if not causal:
        return num_queries * num_keys
    square = min(num_queries, num_keys)
    return square * (square + 1) // 2 + (num_queries - square) * num_keys


def _flops(q: Sequence[int], k: Sequence[int], *, causal: bool, num_products: int) -> int:
    batch, num_heads, num_queries, width = q
    return 2 * num_products * batch * num_heads * width * num_pairs(num_queries, k[2], causal=causal)


_num_modes = torch._C._len_torch_dispatch_stack
_FORWARD = "(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, slots=True)
class Operators:
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    """(q, k, v, causal, scale) -> (o, lse)"""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]
    """(do, q, k, v, o, lse, causal, scale) -> (dq, dk, dv)"""
    forward_overload: OpOverload
    """The OpOverload that torch's dispatch modes see when `forward` is called."""


def _define(name: str, forward: Callable[..., object], backward: Callable[..., object]) -> Operators:
    first = define(f"{name}_forward", _FORWARD, forward, _fake_forward)
    second = define(f"{name}_backward", _BACKWARD, backward, _fake_backward)
    register_flop_formula(first)(lambda q, k, v, causal, *_, **__: _flops(q, k, causal=causal, num_products=2))
    register_flop_formula(second)(
        lambda grad, q, k, v, o, lse, causal, *_, **__: _flops(q, k, causal=causal, num_products=5)
    )
    # Only backward's gradient is new; forward has checked the saved tensors.
    return Operators(_called(first.default, forward, 3), _called(second.default, backward, 1), first.default)


def _called(operator: OpOverload, real: Callable[..., Any], num_looked_at: int) -> Callable[..., Any]:
    """A function that calls the operator, or `real` directly if nothing would see the operator, judged by the first
    num_looked_at tensors.

    Torch's dispatcher takes longer to call a Python function than some of the kernels take.
    """

    def call(*given: Any) -> Any:
        if torch.compiler.is_compiling() or _is_seen(given[:num_looked_at]):
            return operator(*given)
        return real(*given)

    return call


def _is_seen(tensors: tuple[Tensor, ...]) -> bool:
    """True if the dispatcher would do more than call the function on a GPU: for autograd, modes (FLOP counters,
    selective checkpointing), torch.func, profilers, tensor subclasses, and tensors without values.
    """
    if (
        torch.is_grad_enabled()
        or _num_modes() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
    ):
        return True
    return not all(map(_is_plain, tensors))


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and x.is_cuda and not (x.is_neg() or x._is_zerotensor())


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
    """True if Triton's interpreter, which runs on a CPU, would multiply bfloat16's bits as integers."""
    return q.is_cpu and q.dtype == torch.bfloat16


def _refuse_without_interpreter(q: Tensor, k: Tensor, causal: bool) -> None:
    refuse_unserved("flash_triton", q, k, causal=causal, device="cuda" if q.is_cpu else None)
    if q.is_cpu and not runs_on("cpu"):
        raise Unsupported(
            "attention 'flash_triton' on a CPU",
            "it needs TRITON_INTERPRET=1 in the environment (slow, for tests)",
            "choose sdpa or flash_reference",
        )


REFERENCE = _define("flash_reference", _reference_forward, _reference_backward)
TRITON = _define("flash_triton", _triton_forward, _triton_backward)
