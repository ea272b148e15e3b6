"""Loss and gradients of the last linear layer, for a chunk of tokens at a time (docs/cross_entropy.md).

For each chunk, logits = hidden W^T + b. Each row of logits gives its token's loss (`Terms`), and is overwritten by its
gradient, a row of G. Then

    d hidden = G W
    d W += G^T hidden
    d b += sum of the rows of G

These are gradients of sum(scale * loss); the backward pass multiplies them by one number (Hsu et al. 2024, "Liger
Kernel", section 3.2).

Each implementation has two operators of torch: one computes losses and gradients (steplab::cross_entropy_chunked), one
multiplies gradients in place (steplab::cross_entropy_chunked_scale). Their derivative is in cross_entropy.py. Rows are
computed by plain PyTorch (`plain_rows`), the reference, or a kernel (`triton_rows`).

Shape suffixes: N tokens, n tokens of a chunk, C width of the hidden state, V entries of the vocabulary, 1 a dimension
of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .torch_library import define
from .triton_device import on_device_of, refuse_unserved
from .triton_places import ROW_MULTIPLE, chunk_tokens, padded_entries, power_of_two, whole_entries


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss of a token with logits x and target t, with V entries and lse = log(sum(exp(x))).

    loss = lse - (1 - label_smoothing) x[t] - label_smoothing sum(x) / V + z_loss lse²
    gradient of x[j] = softmax(x)[j] (1 + 2 z_loss lse) - (1 - label_smoothing) [j = t] - label_smoothing / V
    """

    ignore_index: int
    label_smoothing: float
    """Weight of the uniform distribution in the targets, from 0 to 1 (Szegedy et al. 2016, section 7)."""
    z_loss: float
    """Weight of the squared log-sum-exp (Chowdhery et al. 2022, "PaLM", section 5)."""


RowStep = Callable[[Tensor, Tensor, Tensor, Tensor | None, Terms], None]
"""(logits_nV, targets_n, losses_n, scale_n, terms): writes the losses, and overwrites the logits.

With a scale, each row of logits becomes its gradient times the row's scale; without, its content is undefined. A target
outside of the vocabulary that is not ignored has a loss of NaN.
"""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's stored gradient: its own, but float32 for fp16. There a mean's gradients could round to
    zero, because the loss scale is applied only in the backward pass.
    """
    return torch.float32 if tensor.dtype == torch.float16 else tensor.dtype


def losses_in_chunks(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    scale_N: Tensor | None,
    terms: Terms,
    *,
    dtype: torch.dtype,
    wanted: Sequence[bool],
    rows: RowStep,
) -> tuple[Tensor, Gradients]:
    """Losses [N] in `sum_dtype`, and the wanted gradients of sum(scale * losses) for hidden, weight and bias.

    Gradients have each tensor's `gradient_dtype`. The matrix products take their factors in `dtype`. Without a scale
    there are no gradients.
    """
    num_tokens, num_entries = hidden_NC.shape[0], weight_VC.shape[0]
    losses_N = hidden_NC.new_empty(num_tokens, dtype=sum_dtype(dtype))
    d_hidden_NC, d_weight_VC, d_bias_V = (
        _gradient_like(tensor, num_tokens) if tensor is not None and asked and scale_N is not None else None
        for tensor, asked in zip((hidden_NC, weight_VC, bias_V), wanted, strict=True)
    )
    hidden_NC, weight_VC = hidden_NC.to(dtype), weight_VC.to(dtype)
    bias_V = None if bias_V is None else bias_V.to(dtype)
    cut = _cut(weight_VC, bias_V)
    step = max(chunk_tokens(num_tokens, num_entries, dtype.itemsize), 1)
    memory = hidden_NC.new_empty(min(step, num_tokens), padded_entries(num_entries))
    for start in range(0, num_tokens, step):
        part, is_first = slice(start, start + step), start == 0
        hidden_nC = hidden_NC[part]
        filled_up = memory[: len(hidden_nC)]
        for columns in cut:
            logits = filled_up[:, columns.filled_up]
            if columns.bias is None:
                torch.mm(hidden_nC, columns.weight.t(), out=logits)
            else:
                torch.addmm(columns.bias, hidden_nC, columns.weight.t(), out=logits)
        logits_nV = filled_up[:, :num_entries]
        rows(logits_nV, targets_N[part], losses_N[part], None if scale_N is None else scale_N[part], terms)
        for columns in cut:
            if d_hidden_NC is not None:
                logits = filled_up[:, columns.filled_up]
                _product(d_hidden_NC[part], logits, columns.weight, add=columns is not cut[0])
            if d_weight_VC is not None:
                logits = logits_nV[:, columns.entries]
                _product(d_weight_VC[columns.entries], logits.t(), hidden_nC, add=not is_first)
        if d_bias_V is not None:
            d_bias_V.add_(logits_nV.sum(0, dtype=d_bias_V.dtype))
    return losses_N, (d_hidden_NC, d_weight_VC, d_bias_V)


@dataclass(frozen=True, slots=True)
class _Columns:
    entries: slice
    filled_up: slice
    """Columns of the padded logits that this product writes. Logits and gradients of padding are zero and ignored."""
    weight: Tensor
    bias: Tensor | None


def _cut(weight_VC: Tensor, bias_V: Tensor | None) -> list[_Columns]:
    num_entries, width = weight_VC.shape
    whole = whole_entries(num_entries)
    first, rest = slice(0, whole), slice(whole, num_entries)
    found = [_Columns(first, first, weight_VC[first], None if bias_V is None else bias_V[first])] if whole else []
    if whole < num_entries:
        weight = weight_VC.new_zeros(ROW_MULTIPLE, width)
        weight[: num_entries - whole] = weight_VC[rest]
        bias = None if bias_V is None else bias_V.new_zeros(ROW_MULTIPLE)
        if bias is not None and bias_V is not None:
            bias[: num_entries - whole] = bias_V[rest]
        found.append(_Columns(rest, slice(whole, whole + ROW_MULTIPLE), weight, bias))
    return found


def _gradient_like(tensor: Tensor, num_tokens: int) -> Tensor:
    make = tensor.new_empty if num_tokens and tensor.dim() == 2 else tensor.new_zeros
    return make(tensor.shape, dtype=gradient_dtype(tensor))


def _product(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """Compute out = a b, or out += a b with `add`, summed in out.dtype, which may be wider than the factors' dtype."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif out.is_cuda:
        # The overloads of a wider result: only the result is in the wider format.
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # torch has them only for CUDA
        _product(out, a.to(out.dtype), b.to(out.dtype), add=add)


def plain_rows(logits_nV: Tensor, targets_n: Tensor, losses_n: Tensor, scale_n: Tensor | None, terms: Terms) -> None:
    """A RowStep in plain PyTorch, the reference for the kernel."""
    num_entries = logits_nV.shape[1]
    x_nV = logits_nV.to(losses_n.dtype)
    is_ignored_n1 = (targets_n == terms.ignore_index).unsqueeze(1)
    is_entry_n1 = ((targets_n >= 0) & (targets_n < num_entries)).unsqueeze(1)
    index_n1 = targets_n.unsqueeze(1).clamp(0, num_entries - 1)
    largest_n1 = x_nV.amax(1, keepdim=True)
    # All differences are from the largest logit: the log-sum-exp itself is rounded in proportion to the logits' size.
    below_nV = x_nV - largest_n1
    at_target_n1 = below_nV.gather(1, index_n1)
    mean_n1 = below_nV.mean(1, keepdim=True) if terms.label_smoothing else 0.0
    exponentials_nV = below_nV.exp_()
    sum_n1 = exponentials_nV.sum(1, keepdim=True)
    lse_n1 = sum_n1.log() + largest_n1

    smoothing = terms.label_smoothing
    loss_n1 = sum_n1.log() - (1 - smoothing) * at_target_n1 + terms.z_loss * lse_n1.square()
    if smoothing:
        loss_n1 = loss_n1 - smoothing * mean_n1
    loss_n1 = torch.where(is_entry_n1, loss_n1, torch.nan).masked_fill(is_ignored_n1, 0)
    losses_n.copy_(loss_n1.squeeze(1))
    if scale_n is None:
        return

    gradient_nV = exponentials_nV.mul_((1 + 2 * terms.z_loss * lse_n1) / sum_n1)
    if smoothing:
        gradient_nV.sub_(smoothing / num_entries)
    gradient_nV.scatter_add_(1, index_n1, torch.full_like(at_target_n1, smoothing - 1))
    gradient_nV.mul_(scale_n.unsqueeze(1)).masked_fill_(is_ignored_n1, 0)
    logits_nV.copy_(gradient_nV)


BLOCK, NUM_WARPS = 16384, 32
"""Columns of a row that a program loads at a time, and its warps: 16 columns for each thread, which has 64 registers.

The fastest of eight candidates on an H200, where a multiprocessor has one row at a time (benchmarks/kernels.py
cross_entropy --tiles).
"""
SCALED_BLOCK, MOST_PROGRAMS = 8192, 1024


def triton_rows(logits_nV: Tensor, targets_n: Tensor, losses_n: Tensor, scale_n: Tensor | None, terms: Terms) -> None:
    refuse_unserved("loss 'fused'", logits_nV, "choose chunked or plain")
    from .cross_entropy_kernels import cross_entropy_softmax_kernel

    num_rows, num_entries = logits_nV.shape
    scale = losses_n if scale_n is None else scale_n
    block = BLOCK // 2 if terms.label_smoothing else BLOCK  # one more sum for each column
    with on_device_of(logits_nV):
        cross_entropy_softmax_kernel[(num_rows,)](
            # a column of a batch, say, has strided targets
            logits_nV, logits_nV.stride(0), targets_n.contiguous(), losses_n, scale, scale.stride(0), num_entries,
            terms.ignore_index, terms.label_smoothing, terms.z_loss, SMOOTHED=terms.label_smoothing > 0,
            WITH_GRADIENT=scale_n is not None, enable_fp_fusion=True, num_warps=NUM_WARPS,
            BLOCK=min(block, max(power_of_two(num_entries), 32 * NUM_WARPS)),
        )  # fmt: skip


def triton_scale(x: Tensor, factor: Tensor) -> None:
    from .cross_entropy_kernels import cross_entropy_scale_kernel

    if x.numel() == 0:
        return
    num_programs = min(-(-x.numel() // SCALED_BLOCK), MOST_PROGRAMS)
    with on_device_of(x):
        cross_entropy_scale_kernel[(num_programs,)](
            x, factor, x.numel(), BLOCK=SCALED_BLOCK, enable_fp_fusion=True, num_warps=8
        )


_LOSSES = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? scale, int ignore_index, "
    "float label_smoothing, float z_loss, ScalarType dtype, bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor)"
)
_SCALE = "(Tensor(a!) gradient, Tensor factor) -> ()"


@dataclass(frozen=True, slots=True)
class Operators:
    losses: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    """(hidden [N, C], weight [V, C], bias [V] or None, targets [N], scale [N] or None, ignore_index, label_smoothing,
    z_loss, dtype, wanted) -> losses [N] and gradients of hidden, weight and bias, as in losses_in_chunks; unwanted ones
    are empty.
    """
    scale: Callable[[Tensor, Tensor], None]


def _define(name: str, rows: RowStep, scale: Callable[[Tensor, Tensor], None]) -> Operators:
    def losses(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor | None, *others: Any
    ) -> tuple[Tensor, ...]:
        *terms, dtype, wanted = others
        with torch.autocast(hidden.device.type, enabled=False):  # the products' formats are fixed already
            found, gradients = losses_in_chunks(
                hidden, weight, bias, targets, scale, Terms(*terms), dtype=dtype, wanted=wanted, rows=rows
            )
        return found, *(hidden.new_empty(0) if gradient is None else gradient for gradient in gradients)

    whole = define(f"cross_entropy_{name}", _LOSSES, losses, _fake_losses)
    scaled = define(f"cross_entropy_{name}_scale", _SCALE, scale, _fake_scale)
    register_flop_formula(whole)(_flops)
    return Operators(whole.default, scaled.default)


def _fake_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    *_, dtype, wanted = others
    gradients = (
        hidden.new_empty(0)
        if tensor is None or scale is None or not asked
        else tensor.new_empty(tensor.shape, dtype=gradient_dtype(tensor))
        for tensor, asked in zip((hidden, weight, bias), wanted, strict=True)
    )
    return hidden.new_empty(hidden.shape[0], dtype=sum_dtype(dtype)), *gradients


def _fake_scale(gradient: Tensor, factor: Tensor) -> None:
    """The operator works in place and returns nothing."""


def _flops(hidden: Sequence[int], weight: Sequence[int], *others: Any, **kwargs: object) -> int:
    _, _, scale, *_, wanted = others
    num_products = 1 + (0 if scale is None else sum(wanted[:2]))
    return 2 * num_products * hidden[0] * hidden[1] * weight[0]


def _plain_scale(gradient: Tensor, factor: Tensor) -> None:
    gradient.mul_(factor)


OPERATORS = {
    "chunked": _define("chunked", plain_rows, _plain_scale),
    "fused": _define("fused", triton_rows, triton_scale),
}
