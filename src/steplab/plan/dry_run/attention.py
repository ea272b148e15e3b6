"""Attention in the dry run: heads apart and together again, the rotary embedding, and each implementation.

The scores are [B, h, T, T]; all else is as large as the residual stream.
"""

from collections.abc import Callable

from steplab.plan.dry_run.events import Product
from steplab.plan.dry_run.machine import Machine
from steplab.plan.dry_run.operators import elementwise
from steplab.plan.dry_run.sizes import BOOL, FP16, FP32, Count
from steplab.plan.dry_run.tape import Backward
from steplab.plan.dry_run.tensors import Tensor

Attend = Callable[[Machine, Tensor, Tensor, Tensor], Tensor]
"""(machine, q_BHTD, k_BHTD, v_BHTD) -> o_BHTD"""


def split_heads(m: Machine, x: Tensor) -> Tensor:
    """[B, T, d] seen as [B, h, T, d / h]. Backward the gradient is copied back into its order, if it is not in it."""
    view = Tensor(x.count, x.dtype, x.storage)
    like, named = (x.count, x.dtype), x.what

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor]:
        if gradient.heads_together or m.sizes.one_order:
            return (gradient,)
        return (m.run("copy", (gradient,), *like, f"gradient of {named}, heads together"),)

    m.node((x.slot,), (), backward).gives(view)
    return view


def merge_heads(m: Machine, x: Tensor) -> Tensor:
    """[B, h, T, d / h] as [B, T, d]: copied, if the heads do not lie together; backward the gradient is seen so."""
    if x.heads_together or m.sizes.one_order:
        merged = Tensor(x.count, x.dtype, x.storage)
    else:
        merged = m.run("copy", (x,), x.count, x.dtype, "attention output, heads together")
    m.node((x.slot,), (), lambda m, kept, gradient: (gradient,)).gives(merged)
    return merged


def heads_apart(m: Machine, x: Tensor) -> Tensor:
    """The output of a batched matmul, whose gradient is copied for the matmuls of its backward."""
    if m.sizes.one_order:
        return x
    view = Tensor(x.count, x.dtype, x.storage)
    like = (x.count, x.dtype, f"gradient of {x.what}, heads apart")

    m.node((x.slot,), (), lambda m, kept, gradient: (m.run("copy", (gradient,), *like),)).gives(view)
    return view


def rotate(m: Machine, x: Tensor, name: str) -> Tensor:
    """The rotary embedding, in the table's fp32, by halves. Keeps nothing but the table."""
    first, second = _halves(m, x)
    together = _join(
        m,
        _add(m, _times_table(m, first), _times_table(m, second), negated=True),
        _add(m, _times_table(m, second), _times_table(m, first), negated=False),
        f"rotated {name}",
    )
    return m.cast(together, x.dtype)


def _halves(m: Machine, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two views; backward their gradients are joined."""
    views = Tensor(m.sizes.half_residual, x.dtype, x.storage), Tensor(m.sizes.half_residual, x.dtype, x.storage)
    like, named = (x.count, x.dtype), x.what

    m.node(
        (x.slot,), (), lambda m, kept, first, second: (m.run("cat", (first, second), *like, f"gradient of {named}"),)
    ).gives(*views)
    return views


def _times_table(m: Machine, half: Tensor) -> Tensor:
    """Cosines or sines times a half, in fp32, whatever the half is in; so is the gradient, at first."""
    table_bytes = m.sizes.rotary.value * FP32.num_bytes // 2

    def times(x: Tensor, what: str) -> Tensor:
        return m.run("mul", (x,), m.sizes.half_residual, FP32, what, also_read_bytes=table_bytes)

    product = times(half, "half a rotation")
    m.node((half.slot,), (), lambda m, kept, gradient: (times(gradient, "gradient of half a rotation"),)).gives(product)
    return product


def _add(m: Machine, x: Tensor, y: Tensor, *, negated: bool) -> Tensor:
    """x + y, or x - y: then the gradient of y is made, not shared."""
    like = (x.count, x.dtype)

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        if not negated:
            return gradient, gradient
        return gradient, m.run("neg", (gradient,), *like, "gradient of half a rotation, negated")

    total = m.run("sub" if negated else "add", (x, y), *like, "half a rotation")
    m.node((x.slot, y.slot), (), backward).gives(total)
    return total


def _join(m: Machine, first: Tensor, second: Tensor, what: str) -> Tensor:
    """Two halves in one tensor; backward its gradient seen as two."""

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        half = m.sizes.half_residual
        return Tensor(half, gradient.dtype, gradient.storage), Tensor(half, gradient.dtype, gradient.storage)

    joined = m.run("cat", (first, second), m.sizes.residual, first.dtype, what)
    m.node((first.slot, second.slot), (), backward).gives(joined)
    return joined


def plain(m: Machine, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ops.attention.plain, line by line."""
    scores = elementwise(m, "mul", _product(m, q, k, m.sizes.scores, "attention scores"), "attention scores, scaled")
    hidden = triangle(m, ones(m))
    scores = elementwise(m, "masked_fill", scores, "attention scores, masked", kept=(hidden,))
    weights = softmax(m, scores)
    return heads_apart(m, _product(m, weights, v, m.sizes.residual, "attention output", copied=True))


def ones(m: Machine) -> Tensor:
    """What the causal mask is made of."""
    return m.run("fill", (), m.sizes.square, BOOL, "ones for the causal mask")


def triangle(m: Machine, ones: Tensor) -> Tensor:
    """The causal mask."""
    return m.run("triu", (ones,), ones.count, BOOL, "causal mask")


def _product(m: Machine, x: Tensor, y: Tensor, out: Count, what: str, copied: bool = False) -> Tensor:
    """x @ y under autocast. `copied`: the heads of y do not lie apart, as a batched matmul needs them."""
    x, y = m.cast(x, m.autocast), m.cast(y, m.autocast)
    return batched_product(m, x, contiguous(m, y) if copied else y, out, what)


def batched_product(m: Machine, x: Tensor, y: Tensor, out: Count, what: str) -> Tensor:
    """Batched matmul. Keeps both."""
    names, sizes = (x.what, y.what), m.sizes
    rows, heads = sizes.context, sizes.batch * sizes.shape.num_heads
    k, n = x.count.value // (heads * rows), out.value // (heads * rows)

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = kept
        of_y, of_x = Product(batch=heads, m=k, n=n, k=rows), Product(batch=heads, m=rows, n=k, k=n)
        gradient_y = m.product("bmm", (gradient, x), of_y, y.count, f"gradient of {names[1]}")
        return m.product("bmm", (gradient, y), of_x, x.count, f"gradient of {names[0]}"), gradient_y

    node = m.node((x.slot, y.slot), (x, y), backward)
    output = m.product("bmm", (x, y), Product(batch=heads, m=rows, n=n, k=k), out, what)
    node.gives(output)
    return output


def contiguous(m: Machine, x: Tensor) -> Tensor:
    """A copy with the heads apart; backward the gradient is passed on."""
    if m.sizes.one_order:
        return x
    output = m.run("copy", (x,), x.count, x.dtype, f"{x.what}, heads apart")
    m.node((x.slot,), (), lambda m, kept, gradient: (gradient,)).gives(output)
    return output


def softmax(m: Machine, scores: Tensor) -> Tensor:
    """Keeps its output. Autocast has it in fp32: for bf16 from a copy of the scores, for fp16 within the kernel."""
    x = m.cast(scores, FP32 if m.autocast and scores.dtype is not FP16 else None)
    output = m.run("_softmax", (x,), x.count, FP32 if m.autocast else x.dtype, "attention weights")
    m.node((x.slot,), (output,), softmax_gradient(x)).gives(output)
    return output


def softmax_gradient(x: Tensor) -> Backward:
    """Backward of a softmax of x. The kernel multiplies gradient and output into a tensor of its own first."""
    like = (x.count, x.dtype, "gradient of the scores")

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor]:
        gradient_x = m.new(*like)
        m.new(gradient.count, gradient.dtype, "gradient times softmax, within the kernel")
        m.ran("_softmax_backward_data", (gradient, *kept), (gradient_x,))
        return (gradient_x,)

    return backward
