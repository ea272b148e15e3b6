"""Bounds for attention that keeps no scores: at most twice plain attention's error against float64."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steplab.ops.attention.api import attention

Results = dict[str, Tensor]


def rms(x: Tensor) -> float:
    return float(x.to(torch.float64).square().mean().sqrt())


def scores_of(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    scale: float | None,
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = product(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf")) if causal else scores


def results_of_plain(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool, scale: float | None = None, tf32: bool = False
) -> Results:
    """Attention as written, in the tensors' type; `tf32` rounds factors as TF32 does, since GPUs use TF32 only for some
    sizes.
    """
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    scores = scores_of(q, k, causal=causal, scale=scale, product=_tf32_product if tf32 else torch.matmul)
    if tf32:
        out = _tf32_product(scores.softmax(-1), v.repeat_interleave(q.shape[1] // v.shape[1], 1))
    else:
        out = attention(q, k, v, causal=causal, scale=scale)
    return _named(out, scores.detach().logsumexp(-1), torch.autograd.grad(out, (q, k, v), do))


class _Tf32Product(torch.autograd.Function):
    """Operands with 10 bits behind the leading one; products and sums in float32."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _to_tf32(a) @ _to_tf32(b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _to_tf32(grad) @ _to_tf32(b).mT, _to_tf32(a).mT @ _to_tf32(grad)


def _tf32_product(a: Tensor, b: Tensor) -> Tensor:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        product: Tensor = _Tf32Product.apply(a, b)  # type: ignore[no-untyped-call]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return product


def _to_tf32(x: Tensor) -> Tensor:
    """Adds and subtracts a number 2^13 times as large (Dekker 1971), where that does not overflow."""
    large = x * (2.0**13 + 1)
    return large - (large - x)


def results_of(
    function: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool, scale: float | None = None
) -> Results:
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = function.apply(q, k, v, causal, scale)
    return _named(out, out.grad_fn.saved_tensors[4], torch.autograd.grad(out, (q, k, v), do))


def _named(out: Tensor, lse: Tensor, gradients: tuple[Tensor, ...]) -> Results:
    return dict(zip(("output", "log-sum-exp", "dq", "dk", "dv"), (out.detach(), lse.detach(), *gradients), strict=True))


def least_errors(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, exact: Results, *, causal: bool, scale: float | None = None
) -> dict[str, float]:
    """Errors below which no kernel without scores can go, by result.

    Results are rounded once. The log-sum-exp sums float32 scores. dS = P (dP - D), D = rowsum(dO O), uses a rounded
    output: an error d of a unit in the last place times the root of the sum of (dO O)², equal over a row; dP and D are
    float32 sums in different orders, a rounding per term. It enters dq as d P K, and dk as a sum of P d Q of either
    sign; plain attention has none where weights are one and zero. Weights come from float32 scores: a score of 5,000 is
    off by up to 5e-4, as is its weight, and in backward the log-sum-exp and its whole row. Near-equal scores of that
    size cause all of the error, in plain attention too.
    """
    eps = torch.finfo(q.dtype).eps
    eps_of_sums = torch.finfo(torch.float32).eps
    factor = abs(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    sharing = q.shape[1] // k.shape[1]
    q, k, v, do = (t.detach().double() for t in (q, k, v, do))
    scores = scores_of(q, k, causal=causal, scale=scale)
    weights = scores.softmax(-1)
    k, v = (t.repeat_interleave(sharing, 1) for t in (k, v))
    dweights = do @ v.mT
    dscores = weights * (dweights - (do * exact["output"]).sum(-1, keepdim=True)) * factor

    # Relative errors of weights: each from its score, rounded in sum and scale, and one common to the row.
    own = eps_of_sums * torch.where(weights > 0, scores.abs(), 0.0)
    row = eps_of_sums / 2 * exact["log-sum-exp"].unsqueeze(-1).abs()
    rounded = eps * (do * exact["output"]).square().sum(-1, keepdim=True).sqrt()
    summed = eps_of_sums / 2 * math.sqrt(q.shape[-1]) * rounded / eps
    d = (rounded + summed) * factor + (dscores * own).square().sum(-1, keepdim=True).sqrt()

    least = {name: eps / 2 * rms(right) for name, right in exact.items()}
    least["log-sum-exp"] = eps_of_sums * max(1.0, rms(exact["log-sum-exp"]))
    # Weights have a sum of one, so that only what differs from the output itself is weighted wrongly.
    squares, o = (weights * own).square(), exact["output"]
    around = squares @ v.square() - 2 * (squares @ v) * o + squares.sum(-1, keepdim=True) * o.square()
    least["output"] += rms(around.clamp(min=0).sqrt())
    least["dq"] += rms(d * (weights @ k)) + rms(row * exact["dq"]) + _root(dscores * own, k)
    for off in (weights * d, dscores * row, dscores * own):
        least["dk"] += _root(off.mT, q, sharing)
    for off in (weights * row, weights * own):
        least["dv"] += _root(off.mT, do, sharing)
    return least


def _root(errors: Tensor, rows: Tensor, sharing: int = 1) -> float:
    """Error of sums of rows with weights and errors of either sign, also over heads that share a result."""
    squares = errors.square() @ rows.square()
    return rms(squares.unflatten(1, (-1, sharing)).sum(2).sqrt())


def assert_at_most_twice_the_error_of_plain(
    function: Any, *tensors: Tensor, causal: bool, scale: float | None = None, **more: Any
) -> None:
    """Twice the rounding cost is allowed if plain attention happens to err less; tensors are q, k, v and do."""
    found = results_of(function, *tensors, causal=causal, scale=scale)
    assert_results_at_most_twice_as_wrong(found, *tensors, causal=causal, scale=scale, **more)


def assert_results_at_most_twice_as_wrong(
    found: Results,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    tf32: bool = False,
    case: object = "",
) -> None:
    wide = (t.detach().double() for t in (q, k, v, do))
    exact = results_of_plain(*wide, causal=causal, scale=scale)
    plain = results_of_plain(q, k, v, do, causal=causal, scale=scale, tf32=tf32)
    least = least_errors(q, k, v, do, exact, causal=causal, scale=scale)
    for name, right in exact.items():
        error, allowed = rms(found[name] - right), 2 * max(rms(plain[name] - right), least[name])
        assert error <= allowed, f"{name} errs by {error:.3g}, where {allowed:.3g} is allowed: {case}"
