"""Accounts for plain attention's peak memory, and finds the smallest attention that does not fit.

It follows ops/attention/plain.py, eager, on CUDA. Local variables live until the function returns, so masked scores
exist during their softmax. softmax's backward holds four tensors of the scores' size (a CPU three): its result, the
incoming gradient, their product, and the outgoing gradient (aten/src/ATen/native/cuda/SoftMax.cu,
softmax_backward_cuda_out).

Symbols: B batch, H heads, G heads of keys and values, S queries, K keys, D dimension, e bytes an element.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

from steplab.errors import UserError
from steplab.records.attention import AttentionAccount, AttentionCell, TensorTerm
from steplab.specs.attention import AttentionSpec

OF_CUDA_ALONE = "gradient times softmax, within the kernel"
_LONGEST = 2**24


def plain_account(spec: AttentionSpec, *, backward: bool) -> tuple[str, tuple[TensorTerm, ...]]:
    """Phase of plain attention's peak memory, and the tensors alive then, inputs included.

    Library workspaces and CUDA's own memory are not counted.
    """
    element = 4 if spec.dtype in ("fp32", "tf32") else 2
    sizes = {"B": spec.batch, "H": spec.heads, "G": spec.num_kv_heads}
    sizes |= {"S": spec.queries, "K": spec.num_keys, "D": spec.dim}

    def tensor(symbols: str, what: str, *, kept: bool = False) -> TensorTerm:
        shape, is_mask = tuple(sizes[symbol] for symbol in symbols.split()), symbols == "S K"
        formula, element_bytes = (symbols, 1) if is_mask else (f"{symbols} e", element)
        return TensorTerm(what=what, formula=formula, shape=shape, element_bytes=element_bytes, kept=kept)

    square, rows, columns, mask = (partial(tensor, symbols) for symbols in ("B H S K", "B H S D", "B G K D", "S K"))
    inputs = (rows("queries"), columns("keys"), columns("values"), rows("gradient of the output"))
    masks = (mask("mask", kept=True),) if spec.causal else ()
    weights = square("softmax of the scores", kept=True)
    last = square("scores, masked" if spec.causal else "scores, scaled")
    moments = [("forward, the product with the values", (*masks, last, weights, rows("output")))]
    if spec.causal:
        made = (square("scores, scaled"), mask("ones, for the mask"), *masks)
        moments.append(("forward, making the mask", made))
    if backward:
        gradients = (square("gradient of the softmax"), square(OF_CUDA_ALONE), square("gradient of the scores"))
        own = (*masks, weights, *gradients, rows("output"), columns("gradient of the values"))
        moments.append(("backward of the softmax", own))
    moment, own = max(moments, key=lambda one: sum(term.num_bytes for term in one[1]))
    return moment, inputs + own


def smallest_that_does_not_fit(
    cells: Sequence[AttentionSpec], memory_bytes: int, memory_source: str, *, backward: bool
) -> AttentionAccount:
    """Account of the smallest of these attentions that does not fit in `memory_bytes`.

    If all fit, their sequences are doubled until one does not. Raises UserError if sequences of up to 2^24 positions
    fit.
    """
    shapes = list(dict.fromkeys(cell.shape for cell in cells))
    if not shapes:
        raise UserError("no shape to account for; name a grid with --grid, or sizes")
    asked, fitting = shapes, list[AttentionSpec]()
    while all(shape.queries <= _LONGEST for shape in shapes):
        failing = [shape for shape in shapes if _needed(shape, backward) > memory_bytes]
        fitting += [shape for shape in shapes if shape not in failing]
        if failing:
            spec = min(failing, key=lambda shape: _needed(shape, backward))
            account = _account(spec, _next_smaller(spec, fitting), memory_bytes, memory_source, backward=backward)
            return dataclasses.replace(account, asked=asked[shapes.index(spec)] if shapes is not asked else None)
        shapes = [dataclasses.replace(s, queries=2 * s.queries, keys=2 * s.num_keys) for s in shapes]
    raise UserError(f"no attention of up to {_LONGEST} positions needs as much as {memory_source} has")


def _next_smaller(spec: AttentionSpec, others: Sequence[AttentionSpec]) -> AttentionSpec | None:
    alike = [o for o in others if dataclasses.replace(o, queries=spec.queries, keys=spec.keys) == spec]
    return max(alike, key=lambda other: other.queries, default=None)


def account_of_failure(
    cells: Sequence[AttentionCell], memory_bytes: int, memory_source: str
) -> AttentionAccount | None:
    """Account of the smallest eager plain attention that ran out of memory, if any."""
    tried = [cell for cell in cells if cell.spec.implementation == "plain" and cell.spec.compile == "off"]
    failed = [(cell, cell.failure) for cell in tried if cell.failure and cell.failure.kind == "out_of_memory"]
    if not failed:
        return None
    cell, failure = min(failed, key=lambda one: _needed(one[0].spec, backward=True))
    previous = _next_smaller(cell.spec, [other.spec for other in tried if not other.failure])
    moment, terms = plain_account(cell.spec, backward=failure.phase not in ("forward", "inputs"))
    account = _account(cell.spec, previous, memory_bytes, memory_source, backward=True)
    return dataclasses.replace(account, moment=moment, terms=terms, measured=failure)


def _account(
    spec: AttentionSpec, previous: AttentionSpec | None, memory_bytes: int, memory_source: str, *, backward: bool
) -> AttentionAccount:
    moment, terms = plain_account(spec, backward=backward)
    return AttentionAccount(
        spec=spec,
        moment=moment,
        terms=terms,
        memory_bytes=memory_bytes,
        memory_source=memory_source,
        previous=previous,
        previous_bytes=_needed(previous, backward) if previous else None,
    )


def _needed(spec: AttentionSpec, backward: bool) -> int:
    return sum(term.num_bytes for term in plain_account(spec, backward=backward)[1])
