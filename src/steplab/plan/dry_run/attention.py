"""Describes attention's operators: splitting and merging heads, the rotary embedding, and each implementation.

The scores are [B, h, T, T]; other tensors are at most as large as the residual stream. A fused kernel saves inputs,
output and the log-sum-exp of each row of scores; ops.attention.implementations lists its backward workspace and its
tensors' layout.
"""

from collections.abc import Callable
from functools import partial
from math import prod

from steplab.costs.kernel_time import Product
from steplab.costs.operators import BACKWARD_FLOPS
from steplab.ops.attention.implementations import Implementation, Workspace, implementation
from steplab.plan.dry_run.machine import Machine
from steplab.plan.dry_run.operators import add, columns, elementwise
from steplab.plan.dry_run.sizes import BOOL, FP16, FP32, Count, Dtype, Sizes, half, rounded_up
from steplab.plan.dry_run.tape import Backward
from steplab.plan.dry_run.tensors import Tensor

Attend = Callable[[Machine, Tensor, Tensor, Tensor], Tensor]
"""(machine, q_BHTD, k_BHTD, v_BHTD) -> o_BHTD"""


def split_heads(m: Machine, x: Tensor) -> Tensor:
    """View [B, T, d] as [B, h, T, d / h]; backward copies a gradient of another memory layout."""
    view = Tensor(x.count, x.dtype, x.storage, x.start)
    view.heads_together = True
    like, named = (x.count, x.dtype), x.what

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor]:
        if gradient.heads_together or m.sizes.one_order(gradient.count):
            return (gradient,)
        return (m.run("copy", (gradient,), *like, f"gradient of {named}, heads together", strided=True),)

    return m.node((x.slot,), (), backward).gives(view)


def merge_heads(m: Machine, x: Tensor) -> Tensor:
    """Turn [B, h, T, d / h] into [B, T, d], by a copy unless the heads are contiguous; backward is a view."""
    if x.heads_together or m.sizes.one_order(x.count):
        merged = Tensor(x.count, x.dtype, x.storage, x.start)
    else:
        merged = m.run("copy", (x,), x.count, x.dtype, "attention output, heads together", strided=True)
    return m.node((x.slot,), (), lambda m, kept, gradient: (gradient,)).gives(merged)


def product_of_heads(m: Machine, x: Tensor) -> Tensor:
    """View a batched matmul's output; backward copies its gradient for the matmuls that read it."""
    if m.sizes.one_order(x.count):
        return x
    view = Tensor(x.count, x.dtype, x.storage, x.start)
    return m.made_from(x, view, "copy", what=f"gradient of {x.what}, heads apart", strided=True)


def rotate(m: Machine, x: Tensor, name: str) -> Tensor:
    """Apply the rotary embedding to the halves of each head, in fp32; saves only the table.

    Learned positions need no rotation.
    """
    if m.sizes.shape.learned_positions:
        return x
    first, second = columns(m, x, half(x.count), half(x.count))
    together = _join(
        m,
        x.count,
        _subtract(m, _times_table(m, first), _times_table(m, second)),
        add(m, _times_table(m, second), _times_table(m, first), "half a rotation"),
        f"rotated {name}",
    )
    return m.cast(together, x.dtype)


def _times_table(m: Machine, part: Tensor) -> Tensor:
    """Multiply half of each head by cosines or sines, in fp32 whatever its format; so is its gradient."""
    table_bytes = m.sizes.rotary.value * FP32.num_bytes // 2
    part_count = part.count

    def times(x: Tensor, what: str) -> Tensor:
        return m.run("mul", (x,), part_count, FP32, what, also_read_bytes=table_bytes, strided=True)

    product = times(part, "half a rotation")
    return m.node((part.slot,), (), lambda m, kept, gradient: (times(gradient, "gradient of half a rotation"),)).gives(
        product
    )


def _subtract(m: Machine, x: Tensor, y: Tensor) -> Tensor:
    like = (x.count, x.dtype)

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, m.run("neg", (gradient,), *like, "gradient of half a rotation, negated")

    total = m.run("sub", (x, y), *like, "half a rotation")
    return m.node((x.slot, y.slot), (), backward).gives(total)


def _join(m: Machine, whole: Count, first: Tensor, second: Tensor, what: str) -> Tensor:
    part = first.count

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        first, second = gradient.parts(part, part)
        return first, second

    joined = m.run("cat", (first, second), whole, first.dtype, what, strided=True)
    return m.node((first.slot, second.slot), (), backward).gives(joined)


def plain(m: Machine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if m.sizes.shape.num_kv_heads is not None:
        k, v = repeated(m, k), repeated(m, v)
    scores = elementwise(m, "mul", _product(m, q, k, m.sizes.scores, "attention scores"), "attention scores, scaled")
    hidden = causal_mask(m)
    scores = elementwise(m, "masked_fill", scores, "attention scores, masked", kept=(hidden,))
    weights = softmax(m, scores)
    return product_of_heads(m, _product(m, weights, v, m.sizes.residual, "attention output"))


def repeated(m: Machine, x: Tensor) -> Tensor:
    """Repeat keys or values for each head of queries; backward sums the gradients of a group."""
    return m.made_from(x, m.run("copy", (x,), m.sizes.residual, x.dtype, f"{x.what}, repeated"), "sum")


def causal_mask(m: Machine) -> Tensor:
    ones = m.run("fill", (), m.sizes.square, BOOL, "ones for the causal mask")
    return m.run("triu", (ones,), ones.count, BOOL, "causal mask")


def _product(m: Machine, x: Tensor, y: Tensor, out: Count, what: str) -> Tensor:
    return batched_product(m, m.cast(x, m.autocast), m.cast(y, m.autocast), out, what)


def batched_product(m: Machine, x: Tensor, y: Tensor, out: Count, what: str) -> Tensor:
    """Batched matmul; inputs in the layout of [B, T, d] are copied first. Saves both inputs."""
    x, y = _heads_apart(m, x), _heads_apart(m, y)
    names, sizes = (x.what, y.what), m.sizes
    rows, heads = sizes.context, sizes.batch * sizes.heads
    k, n = x.count.value // (heads * rows), out.value // (heads * rows)

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = kept
        of_y = Product(batch=heads, m=k, n=n, k=rows, transposed=True)
        of_x = Product(batch=heads, m=rows, n=k, k=n)
        gradient_y = m.product("bmm", (gradient, x), of_y, y.count, f"gradient of {names[1]}")
        return m.product("bmm", (gradient, y), of_x, x.count, f"gradient of {names[0]}"), gradient_y

    node = m.node((x.slot, y.slot), (x, y), backward)
    output = m.product("bmm", (x, y), Product(batch=heads, m=rows, n=n, k=k), out, what)
    return node.gives(output)


def _heads_apart(m: Machine, x: Tensor) -> Tensor:
    if not x.heads_together or m.sizes.one_order(x.count):
        return x
    output = m.run("copy", (x,), x.count, x.dtype, f"{x.what}, heads apart", strided=True)
    return m.node((x.slot,), (), lambda m, kept, gradient: (gradient,)).gives(output)


def softmax(m: Machine, scores: Tensor) -> Tensor:
    """Softmax of the scores, which saves its output; under autocast in fp32.

    bf16 scores are copied to fp32 first, fp16 ones are converted within the kernel.
    """
    x = m.cast(scores, FP32 if m.autocast and scores.dtype is not FP16 else None)
    output = m.run("_softmax", (x,), x.count, FP32 if m.autocast else x.dtype, "attention weights")
    return m.node((x.slot,), (output,), softmax_gradient(x)).gives(output)


def softmax_gradient(x: Tensor) -> Backward:
    """Backward of a softmax of x; its kernel first writes gradient times output to a temporary tensor."""
    like = (x.count, x.dtype, "gradient of the scores")

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor]:
        gradient_x = m.new(*like)
        m.new(gradient.count, gradient.dtype, "gradient times softmax, within the kernel")
        m.ran("_softmax_backward_data", (gradient, *kept), (gradient_x,))
        return (gradient_x,)

    return backward


_KEYS = ("rotated key", "value")
_OF_FORWARD = ("rotated query", *_KEYS, "attention output")
_GRADIENTS_OF_KEYS = ("gradient of the rotated key", "gradient of the value")
_OF_BACKWARD = (
    *("gradient of the rotated query", *_GRADIENTS_OF_KEYS),
    *("gradient of the attention output", "attention output", "rotated query", *_KEYS),
)
"""Tensors that are padded if the kernels need a larger head dimension, in copying order."""


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
        shape = m.sizes.shape
        shared = shape.num_kv_heads is not None
        expanded = _GRADIENTS_OF_KEYS if row.expands_groups and shared else ()
        _of_each_head = [m.new(m.sizes.residual, dtype, f"{what}, of each head") for what in expanded]
        own = [each for each in row.workspaces if each.taken(dtype.num_bytes, shape.head_dim, shared=shared)]
        _within = [m.new(_of_workspace(m.sizes, each), FP32, each.what) for each in own]
        m.ran(f"{row.name}_backward", (gradient, *kept), gradients, product=scores, fused_flops=BACKWARD_FLOPS * flops)
        return gradients

    row_sums = m.dear(run)

    return m.node((q.slot, k.slot, v.slot), (q, k, v, output, row_sums), backward).gives(output)


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


def math(m: Machine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's math attention, in fp32, with an additive mask and a softmax that allows fully masked rows."""
    source = q.dtype
    q, k, v = m.cast(q, FP32), m.cast(k, FP32), m.cast(v, FP32)
    q = elementwise(m, "mul", q, f"{q.what}, scaled")
    mask = m.run("where", (causal_mask(m),), m.sizes.square, FP32, "causal mask, in fp32")
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


def _safe_softmax(m: Machine, scores: Tensor) -> Tensor:
    unsafe = m.new(scores.count, FP32, "attention weights, unsafe")
    hidden = m.new(scores.count, BOOL, "hidden scores")
    weights = m.run("_safe_softmax", (scores,), scores.count, FP32, "attention weights")
    m.node((scores.slot,), (weights,), softmax_gradient(scores)).gives(weights)
    del unsafe, hidden
    return weights


_COMPOSED: dict[str, Attend] = {"plain": plain, "sdpa_math": math}
