"""Attention that stores no scores, and torch's composition, in the dry run.

A fused kernel saves its inputs, its output and one number a row. The table of ops.attention.implementations lists its
backward workspace and the layout of its tensors.
"""

from functools import partial
from math import prod

from steplab.costs.kernel_time import Product
from steplab.costs.operators import BACKWARD_FLOPS
from steplab.ops.attention.implementations import Implementation, Workspace, implementation
from steplab.plan.dry_run.attention import (
    Attend,
    batched_product,
    ones,
    plain,
    product_of_heads,
    repeated,
    softmax_gradient,
    triangle,
)
from steplab.plan.dry_run.machine import Machine
from steplab.plan.dry_run.operators import elementwise
from steplab.plan.dry_run.sizes import BOOL, FP32, Count, Dtype, Sizes, rounded_up
from steplab.plan.dry_run.tensors import Tensor

_KEYS = ("rotated key", "value")
_OF_FORWARD = ("rotated query", *_KEYS, "attention output")
_GRADIENTS_OF_KEYS = ("gradient of the rotated key", "gradient of the value")
_OF_BACKWARD = (
    *("gradient of the rotated query", *_GRADIENTS_OF_KEYS),
    *("gradient of the attention output", "attention output", "rotated query", *_KEYS),
)
"""Tensors that are copied if the kernels need another layout, in copying order."""


def attention_of(name: str) -> Attend:
    return _COMPOSED.get(name) or partial(_fused, row=implementation(name))


def _fused(m: Machine, q: Tensor, k: Tensor, v: Tensor, row: Implementation) -> Tensor:
    likes = [(x.count, x.dtype, f"gradient of {x.what}") for x in (q, k, v)]
    orders = [x.heads_together for x in (q, k, v)]
    output = m.dear(lambda: m.new(q.count, q.dtype, "attention output"))
    output.heads_together = row.output_heads_together or q.heads_together  # kernels lay it out as the queries
    sizes = m.sizes
    rows = _of_workspace(sizes, Workspace(what="saved rows", tokens=row.saved_rows))
    dtype = q.dtype
    scores = Product(batch=sizes.batch * sizes.heads, m=sizes.context, n=sizes.context, k=sizes.shape.head_dim)
    flops = float(scores.flops)  # two products, halved by the causal mask

    def run() -> Tensor:
        made = m.new(rows, FP32, "log of the sum of each row of scores")
        _copies = _padded(m, dtype, row, _OF_FORWARD)
        m.ran(row.name, (q, k, v), (output, made), product=scores, fused_flops=flops)
        return made

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
        gradients = tuple(m.new(*like) for like in likes)
        for made, together in zip(gradients, orders, strict=True):
            made.heads_together = together
        _copies = _padded(m, dtype, row, _OF_BACKWARD)
        _of_each_head = _expanded(m, dtype) if row.expands_groups else []
        shape = m.sizes.shape
        shared = shape.num_kv_heads is not None
        own = [each for each in row.workspaces if each.taken(dtype.num_bytes, shape.head_dim, shared=shared)]
        _within = [m.new(_of_workspace(m.sizes, each), FP32, each.what) for each in own]
        m.ran(f"{row.name}_backward", (gradient, *kept), gradients, product=scores, fused_flops=BACKWARD_FLOPS * flops)
        return gradients

    row_sums = m.dear(run)

    m.node((q.slot, k.slot, v.slot), (q, k, v, output, row_sums), backward).gives(output)
    return output


def _of_workspace(sizes: Sizes, taken: Workspace) -> Count:
    heads, symbol = (sizes.kv_heads, "k") if taken.of_shared_keys else (sizes.heads, "h")
    shape = taken.shape(sizes.batch, heads, sizes.context, sizes.shape.head_dim)
    symbols = " ".join(["B", symbol, *map(str, shape[2:])])
    if taken.tokens == 1 and taken.width in (None, 1):  # sizes are not rounded up
        symbols = (sizes.rows if taken.width is None else sizes.residual).symbols
    return Count(taken.times * prod(shape), symbols if taken.times == 1 else f"{symbols} {taken.times}")


def _padded(m: Machine, dtype: Dtype, row: Implementation, tensors: tuple[str, ...]) -> list[Tensor]:
    shape, tokens = m.sizes.shape, m.sizes.tokens.value
    width = rounded_up(shape.head_dim, max(row.copies_below // dtype.num_bytes, 1))
    if width == shape.head_dim:
        return []
    of_queries = Count(tokens * m.sizes.heads * width, f"B h T {width}")
    of_keys = of_queries if shape.num_kv_heads is None else Count(tokens * m.sizes.kv_heads * width, f"B k T {width}")
    keys = (*_KEYS, *_GRADIENTS_OF_KEYS)
    return [m.new(of_keys if what in keys else of_queries, dtype, f"{what}, padded") for what in tensors]


def _expanded(m: Machine, dtype: Dtype) -> list[Tensor]:
    if m.sizes.shape.num_kv_heads is None:
        return []
    return [m.new(m.sizes.residual, dtype, f"{what}, of each head") for what in _GRADIENTS_OF_KEYS]


def math(m: Machine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own composition, in fp32, with an additive mask and a softmax that is safe for rows hidden entirely."""
    source = q.dtype
    q, k, v = m.cast(q, FP32), m.cast(k, FP32), m.cast(v, FP32)
    q = elementwise(m, "mul", q, f"{q.what}, scaled")
    mask = _mask_of_numbers(m)
    if m.sizes.shape.num_kv_heads is not None:
        k, v = repeated(m, k), repeated(m, v)
    k = elementwise(m, "mul", k, f"{k.what}, scaled")
    scores = batched_product(m, q, k, m.sizes.scores, "attention scores")
    weights = _safe_softmax(m, scores)
    del scores
    _for_the_caller = weights if source is FP32 else m.copy(weights, source)
    output = m.cast(product_of_heads(m, batched_product(m, weights, v, m.sizes.residual, "attention output")), source)
    del mask
    return output


def _mask_of_numbers(m: Machine) -> Tensor:
    hidden = triangle(m, ones(m))
    numbers = m.run("where", (hidden,), m.sizes.square, FP32, "causal mask, in fp32")
    del hidden
    return numbers


def _safe_softmax(m: Machine, scores: Tensor) -> Tensor:
    unsafe = m.new(scores.count, FP32, "attention weights, unsafe")
    hidden = m.new(scores.count, BOOL, "hidden scores")
    weights = m.run("_safe_softmax", (scores,), scores.count, FP32, "attention weights")
    m.node((scores.slot,), (weights,), softmax_gradient(scores)).gives(weights)
    del unsafe, hidden
    return weights


_COMPOSED: dict[str, Attend] = {"plain": plain, "sdpa_math": math}
