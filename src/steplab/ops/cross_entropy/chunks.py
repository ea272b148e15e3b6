"""The algorithm: loss and gradients of the last linear layer, for a chunk of tokens at a time.

For each chunk, logits = hidden W^T + b; then in each row of them (see `Terms`) the loss is read off and the row is
overwritten by its gradient G; then

    d hidden = G W          d W += G^T hidden          d b += sum of the rows of G

So the logits of one chunk are all that is ever in memory, each is computed once, and a training step has the three
matrix products that it has without chunks. The gradients are there before anyone asks for them, as gradients of
sum(scale * loss): a backward pass has one number to multiply them with. (Hsu et al. 2024, "Liger Kernel", section 3.2.)

Products are summed in float32. Where the weight is bf16, its gradient is rounded to bf16 once a chunk, so the
rounding error of C chunks is at most C times that of one product; where it is float32, as under autocast, chunks are
added up in float32.

Shape suffixes: N tokens, n tokens of a chunk, C width of the hidden state, V entries of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from steplab.ops.cross_entropy.implementations import ROW_MULTIPLE, chunk_tokens, padded_entries, whole_entries


@dataclass(frozen=True, slots=True)
class Terms:
    """What a token's loss is made of, besides its logits x and its target t; V entries, lse = log(sum(exp(x))).

    loss = lse - (1 - label_smoothing) x[t] - label_smoothing sum(x) / V + z_loss lse²
    gradient of x[j] = softmax(x)[j] (1 + 2 z_loss lse) - (1 - label_smoothing) [j = t] - label_smoothing / V
    """

    ignore_index: int
    """A token with this target has no loss and no gradient."""
    label_smoothing: float
    """Weight of the uniform distribution in the targets, from 0 to 1 (Szegedy et al. 2016, section 7)."""
    z_loss: float
    """Weight of the squared log-sum-exp (Chowdhery et al. 2022, "PaLM", section 5)."""


RowStep = Callable[[Tensor, Tensor, Tensor, Tensor | None, Terms], None]
"""(logits_nV, targets_n, losses_n, scale_n, terms): writes the losses; with a scale it overwrites each row of logits by
its gradient times the row's scale, else it may overwrite them by anything. A target that is no entry of the vocabulary,
and not ignored, has a loss of NaN."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The gradients of hidden, weight and bias; None where one is not wanted."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The number format of losses and of sums, for logits in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_dtype(tensor: Tensor) -> torch.dtype:
    """The number format in which a gradient is formed and kept. The mean's gradients are too small for fp16 before a
    loss scale is multiplied into them."""
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
    wanted: tuple[bool, bool, bool],
    rows: RowStep,
) -> tuple[Tensor, Gradients]:
    """Losses [N] in `sum_dtype`, and the wanted gradients of sum(scale * losses) in each tensor's `gradient_dtype`.

    The matrix products take their factors in `dtype`. Without a scale there are no gradients.
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
    """Entries of the vocabulary that are in one product."""

    entries: slice
    """Which ones."""
    filled_up: slice
    """The columns of logits that the product has: those, and what the weight is filled up with. Their logits are zero
    and no part of the loss; as gradients they are zero as well."""
    weight: Tensor
    bias: Tensor | None


def _cut(weight_VC: Tensor, bias_V: Tensor | None) -> list[_Columns]:
    """The vocabulary as one product takes it, or two; see implementations.whole_entries."""
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
    """Memory for a gradient: zeros where it is only added to, which is so of the bias, and where no token comes."""
    make = tensor.new_empty if num_tokens and tensor.dim() == 2 else tensor.new_zeros
    return make(tensor.shape, dtype=gradient_dtype(tensor))


def _product(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """out = a b, or out += a b, with `out` in the format of the factors or in a wider one, in which is then summed."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif out.is_cuda:
        # The overloads of a wider result: nothing but the result is in the wider format.
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # torch has them for CUDA alone
        _product(out, a.to(out.dtype), b.to(out.dtype), add=add)
