"""The autograd Functions of flash attention, FlashAttentionReference and FlashAttentionTriton, which keep no scores.

They save exactly q, k, v, the output and the log-sum-exp of each row of scores, of q's shape without its last
dimension.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import Unsupported
from .operators import REFERENCE, TRITON, Operators
from .shapes import as_autocast_would, as_four_dims, check_inputs, default_scale

Gradients = tuple[Tensor, Tensor, Tensor, None, None]


class _FlashAttention(torch.autograd.Function):
    operators: Operators

    @classmethod
    def apply(cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
        """Return softmax(scale q k^T) v, with shapes and errors as in api.attention. torch.compile calls `forward`
        directly.
        """
        # torch.func's transforms need a Function in another form, and forward-mode differentiation an error. Torch has
        # no public way to detect either.
        if torch._C._are_functorch_transforms_active():
            output: Tensor = _Transformable.apply(q, k, v, is_causal, scale, cls.operators)[0]  # type: ignore[no-untyped-call]
            return output
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:  # no gradient will be requested
            return _computed(cls.operators, q, k, v, is_causal, scale)[0]
        # Function.apply's own Python takes longer than some kernels, and serves only those transforms.
        attended: Tensor = super(torch.autograd.Function, cls).apply(q, k, v, is_causal, scale)  # type: ignore[misc]
        return attended


class FlashAttentionReference(_FlashAttention):
    """FlashAttention-2 in tiled PyTorch (see flash_reference.py), on any device and in float64 too."""

    operators = REFERENCE

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        return _forward(ctx, REFERENCE, q, k, v, is_causal, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return _backward(ctx, REFERENCE, grad)


class FlashAttentionTriton(_FlashAttention):
    """FlashAttention-2 in Triton kernels, on CUDA (or on a CPU under TRITON_INTERPRET=1)."""

    operators = TRITON

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        return _forward(ctx, TRITON, q, k, v, is_causal, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return _backward(ctx, TRITON, grad)


class _Transformable(torch.autograd.Function):
    """The same attention for torch.func, which needs saved tensors as outputs, and a rule for vmap."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, operators: Operators
    ) -> tuple[Tensor, ...]:
        o, lse, *cast = _computed(operators, q, k, v, is_causal, scale)
        # An input that is also an output may only be saved as a view.
        return o, lse, *(t.view_as(t) for t in cast)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, ctx.is_causal, ctx.scale, ctx.operators = inputs
        o, lse, *cast = output
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        ctx.mark_non_differentiable(lse, *cast)
        ctx.save_for_backward(*cast, o, lse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, ctx.operators, grad), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        q, k, v = (
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(args[:3], in_dims[:3], strict=True)
        )
        outputs = _Transformable.apply(q, k, v, *args[3:])  # type: ignore[no-untyped-call]
        return outputs, (0,) * len(outputs)


class _Underivable(torch.autograd.Function):
    """Passes gradients through, and raises Unsupported for a second derivative, which torch would otherwise omit
    silently.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(dq: Tensor, dk: Tensor, dv: Tensor, *made_of: Tensor) -> tuple[Tensor, ...]:
        return dq.clone(), dk.clone(), dv.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        raise Unsupported(
            "the second derivative of flash attention", "its backward pass has none", "choose plain or sdpa_math for it"
        )


def _forward(
    ctx: Any, operators: Operators, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
) -> Tensor:
    ctx.is_causal, ctx.scale, ctx.dtypes = is_causal, scale, (q.dtype, k.dtype, v.dtype)
    o, lse, q, k, v = _computed(operators, q, k, v, is_causal, scale)
    ctx.save_for_backward(q, k, v, o, lse)
    return o


def _computed(
    operators: Operators, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = as_autocast_would(q, k, v)
    check_inputs(q, k, v)
    scale = default_scale(q, scale)
    if q.dim() == 4:
        o, lse = operators.forward(q, k, v, is_causal, scale)
        return o, lse, q, k, v
    o, lse = operators.forward(as_four_dims(q), as_four_dims(k), as_four_dims(v), is_causal, scale)
    return o.view(q.shape), lse.view(q.shape[:-1]), q, k, v


def _backward(ctx: Any, operators: Operators, grad: Tensor) -> Gradients:
    q, k, v, o, lse = ctx.saved_tensors
    scale = default_scale(q, ctx.scale)
    if q.dim() == 4:
        dq, dk, dv = operators.backward(grad, q, k, v, o, lse, ctx.is_causal, scale)
    else:
        in_four = [as_four_dims(x) for x in (grad, q, k, v, o, lse.unsqueeze(-1))]
        do_BHSD, q_BHSD, k_BNKD, v_BNKD, o_BHSD, lse_BHS1 = in_four
        dq, dk, dv = operators.backward(
            do_BHSD, q_BHSD, k_BNKD, v_BNKD, o_BHSD, lse_BHS1.squeeze(-1), ctx.is_causal, scale
        )
        dq, dk, dv = dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
    of_q, of_k, of_v = ctx.dtypes
    if not q.dtype == of_q == of_k == of_v:  # autocast changed them
        dq, dk, dv = dq.to(of_q), dk.to(of_k), dv.to(of_v)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the gradients may be differentiated again
        dq, dk, dv = _Underivable.apply(dq, dk, dv, q, k, v, grad)  # type: ignore[no-untyped-call]
    return dq, dk, dv, None, None
