"""Describes the model's operators outside of attention: their allocations, saved tensors and backward passes.

A function holds its arguments until it returns, as torch's do; a backward function so holds its gradient.

Under tensor parallelism, tokens are gathered before the first matmuls, and sums scattered after the last. DTensor
copies what it gathered into the order of tokens, and what it scatters into the order of ranks
(torch/distributed/tensor/_collective_utils.py).
"""

from collections.abc import Callable

from steplab.costs.kernel_time import Product
from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.sizes import BF16, FP8, FP32, INT64, Count
from steplab.plan.dry_run.tensors import Tensor

_BACKWARD = {"silu": "silu_backward", "gelu": "gelu_backward"}


def embedding(m: Machine, weight: Parameter) -> Tensor:
    """Look up the tokens' rows; saves only the token ids, which exist anyway."""
    tokens_bytes = m.sizes.tokens.value * INT64.num_bytes
    return _rows(m, weight, m.sizes.gathered, "residual stream", (), tokens_bytes)


def learned_positions(m: Machine, weight: Parameter) -> Tensor:
    """Look up a row for each position; saves the position numbers, which it makes."""
    numbers = m.run("arange", (), m.sizes.positions, INT64, "numbers of the positions")
    return _rows(m, weight, m.sizes.positions_width, "learned positions", (numbers,), 0)


def _rows(
    m: Machine, weight: Parameter, out: Count, what: str, numbers: tuple[Tensor, ...], numbers_bytes: int
) -> Tensor:
    dtype = weight.tensor.dtype

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor]:
        gradient_w = _gradient_of(m, weight)
        m.ran("embedding_dense_backward", (gradient, *kept), (gradient_w,), also_read_bytes=numbers_bytes)
        return (gradient_w,)

    rows_bytes = out.value * dtype.num_bytes
    x = m.run("embedding", numbers, out, dtype, what, also_read_bytes=numbers_bytes + rows_bytes)
    return m.node((weight.slot,), numbers, backward).gives(x)


def add_positions(m: Machine, x: Tensor, positions: Tensor) -> Tensor:
    """x + positions; these are the same for every sequence, so their gradient is a sum over the batch."""
    like = (positions.count, positions.dtype, "gradient of learned positions")

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, m.run("sum", (gradient,), *like)

    output = m.run("add", (x, positions), x.count, x.dtype, "residual stream")
    return m.node((x.slot, positions.slot), (), backward).gives(output)


def elementwise(m: Machine, name: str, x: Tensor, what: str, kept: tuple[Tensor, ...] = ()) -> Tensor:
    """Apply an elementwise operator to x; backward reads the output's gradient and the kept tensors."""
    output = m.run(name, (x, *(tensor for tensor in kept if tensor is not x)), x.count, x.dtype, what)
    output.heads_together = x.heads_together
    return m.made_from(x, output, _BACKWARD.get(name, name), kept)


def linear(m: Machine, x: Tensor, weight: Parameter, out: Count, what: str, bias: Parameter | None = None) -> Tensor:
    """x W^T, with a bias by torch's addmm. Saves x and W, in the matmul's format."""
    w = m.weight(weight)
    x = m.cast(x, m.autocast)
    b = None if bias is None else m.weight(bias)
    named, tokens = x.what, m.sizes.tokens.value
    k, n = x.count.value // tokens, out.value // tokens

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
        x, w = kept
        of_x = (gradient, w), Product(m=tokens, n=k, k=n), x.count, f"gradient of {named}"
        of_w = (gradient, x), Product(m=n, n=k, k=tokens, transposed=True), w.count, f"gradient of {weight.name}"
        # addmm's backward makes the gradient of x first and the bias's last
        made = [m.product("mm", *each) for each in ((of_w, of_x) if bias is None else (of_x, of_w))]
        for each in made:
            each.is_view = True  # of the matmul's output
        if bias is None or b is None:
            return made[1], made[0]
        return m.run("sum", (gradient,), b.count, b.dtype, f"gradient of {bias.name}"), *made

    inputs = (x, w) if b is None else (b, x, w)
    node = m.node(tuple(each.slot for each in inputs), (x, w), backward)
    name, added = ("mm", ()) if b is None else ("addmm", (b,))
    return node.gives(m.product(name, (x, w), Product(m=tokens, n=n, k=k), out, what, added=added))


def fp8_linear(
    m: Machine, x: Tensor, weight: Parameter, out: Count, what: str, bias: Parameter | None, known: tuple[bool, bool]
) -> Tensor:
    """As ops/fp8/linear: each operand is cast by rows and by columns. Saves x and W by columns, in fp8.

    known: True for x and for the output's gradient if their largest magnitudes are known before the cast.
    """
    w, named, tokens = weight.tensor, x.what, m.sizes.tokens.value
    x = m.cast(x, BF16)
    of_input, of_weight = x.count, w.count  # keeps backward's closure from holding the tensors
    k, n = x.count.value // tokens, out.value // tokens
    w_rows, w_columns = _in_fp8(m, w, amax_known=False)
    x_rows, x_columns = _in_fp8(m, x, amax_known=known[0])

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        w8, x8 = kept
        by_rows, by_columns = _in_fp8(m, gradient, amax_known=known[1])
        of_w, of_x = Product(m=n, n=k, k=tokens), Product(m=tokens, n=k, k=n)
        what_w = f"gradient of {weight.name}"
        gradient_w = m.product("_scaled_mm", (by_columns, x8), of_w, of_weight, what_w, dtype=BF16)
        gradient_x = m.product("_scaled_mm", (by_rows, w8), of_x, of_input, f"gradient of {named}", dtype=BF16)
        return gradient_x, gradient_w

    node = m.node((x.slot, w.slot), (w_columns, x_columns), backward)
    output = m.product("_scaled_mm", (x_rows, w_rows), Product(m=tokens, n=n, k=k), out, what, dtype=BF16)
    node.gives(output)
    return output if bias is None else _plus_bias(m, output, bias)


def _in_fp8(m: Machine, x: Tensor, *, amax_known: bool) -> tuple[Tensor, Tensor]:
    """Cast x to fp8 by rows and by columns, after its largest magnitude is found unless it is known.

    Two fills are reported: one for the largest magnitude, one with which the next matmul clears its workspace.
    """
    for _ in range(2):
        largest = m.run("fill", (), m.sizes.one, FP32, f"largest magnitude of {x.what}")
    if not amax_known:
        m.ran("fp8_amax", (x,), (largest,))
    made = m.new(x.count, FP8, f"{x.what}, in fp8"), m.new(x.count, FP8, f"{x.what}, in fp8 by columns")
    m.ran("fp8_cast_both", (x,), made)
    return made


def _plus_bias(m: Machine, x: Tensor, bias: Parameter) -> Tensor:
    b = m.weight(bias)

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, m.run("sum", (gradient,), b.count, b.dtype, f"gradient of {bias.name}")

    node = m.node((x.slot, b.slot), (), backward)
    output = m.run("add", (x, b), x.count, x.dtype, x.what)
    return node.gives(output)


def columns(m: Machine, x: Tensor, *counts: Count) -> tuple[Tensor, ...]:
    """Views of neighbouring columns; backward concatenates their gradients."""
    views = x.parts(*counts)
    like, named = (x.count, x.dtype), x.what

    def backward(m: Machine, kept: tuple[Tensor, ...], *gradients: Tensor) -> tuple[Tensor]:
        return (m.run("cat", gradients, *like, f"gradient of {named}", strided=True),)

    m.node((x.slot,), (), backward).gives(*views)
    return views


def rms_norm(m: Machine, x: Tensor, weight: Parameter, what: str) -> Tensor:
    """torch's fused RMSNorm: saves its input and one number a token.

    From torch 2.12 on, autocast runs it in fp32, the format of the residual stream and the weight, without casts.
    """
    if x.dtype is not weight.tensor.dtype and m.gathering is not None and not m.gathering.fused_norms:
        return _composed_rms_norm(m, x, weight, what)
    like, named = (x.count, x.dtype), x.what
    output = m.new(*like, what)
    reciprocal = m.new(m.sizes.rows_of_stream, FP32, "reciprocal root mean squares")

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        gradient_x, gradient_w = m.new(*like, f"gradient of {named}"), _gradient_of(m, weight)
        m.ran("_fused_rms_norm_backward", (gradient, *kept, weight.tensor), (gradient_x, gradient_w))
        return gradient_x, gradient_w

    m.ran("_fused_rms_norm", (x, weight.tensor), (output, reciprocal))
    return m.node((x.slot, weight.slot), (x, reciprocal), backward).gives(output)


def _composed_rms_norm(m: Machine, x: Tensor, weight: Parameter, what: str) -> Tensor:
    """RMSNorm in torch's own operators (rms_norm_composite): x times its reciprocal root mean square, then the weight.

    Saves x, the reciprocals and the product of both.
    """
    like, named = (x.count, x.dtype), x.what
    reciprocal = m.new(m.sizes.rows_of_stream, FP32, "reciprocal root mean squares")
    m.run("pow", (x,), *like, "squares")
    normalised = m.run("mul", (x, reciprocal), *like, f"{what}, before its weight")

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        products = m.run("mul", (gradient, kept[2]), *like, "gradient of the norm's weight, token by token")
        gradient_w = _gradient_of(m, weight)
        m.ran("sum", (products,), (gradient_w,))
        del products
        gradient_n = m.run("mul", (gradient, weight.tensor), *like, f"gradient of {what}, before its weight")
        gradient_x = m.run("mul", (gradient_n, kept[1]), *like, f"gradient of {named}")
        _of_reciprocals = m.run("mul", (gradient_n, kept[0]), *like, f"gradient of {named}, by its mean square")
        return gradient_x, gradient_w

    output = m.run("mul", (normalised, weight.tensor), *like, what)
    return m.node((x.slot, weight.slot), (x, reciprocal, normalised), backward).gives(output)


def layer_norm(m: Machine, x: Tensor, weight: Parameter, bias: Parameter | None, what: str) -> Tensor:
    """torch's LayerNorm: saves its input and two numbers a token. Under autocast all of it is fp32, without casts."""
    like, named = (x.count, x.dtype), x.what
    parameters = (weight,) if bias is None else (weight, bias)
    tensors = tuple(parameter.tensor for parameter in parameters)
    output = m.new(*like, what)
    names = ("means", "reciprocal standard deviations")
    mean, reciprocal = (m.new(m.sizes.rows_of_stream, FP32, which) for which in names)

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
        gradients = (m.new(*like, f"gradient of {named}"), *(_gradient_of(m, p) for p in parameters))
        m.ran("native_layer_norm_backward", (gradient, *kept, *tensors), gradients)
        return gradients

    m.ran("native_layer_norm", (x, *tensors), (output, mean, reciprocal))
    return m.node((x.slot, *(p.slot for p in parameters)), (x, mean, reciprocal), backward).gives(output)


def add(m: Machine, x: Tensor, y: Tensor, what: str = "residual stream") -> Tensor:
    """Add two tensors, in the wider format. Saves nothing; both share the output's gradient."""
    output = m.run("add", (x, y), x.count, x.dtype, what)
    return m.node((x.slot, y.slot), (), lambda m, kept, gradient: (gradient, gradient)).gives(output)


def activation(m: Machine, name: str, x: Tensor, what: str) -> Tensor:
    """x sigmoid(x) for silu, x Phi(x) for gelu. Saves x."""
    return elementwise(m, name, x, what, kept=(x,))


def multiply(m: Machine, x: Tensor, y: Tensor, what: str) -> Tensor:
    """Elementwise product of two tensors of one shape. Saves both."""
    like, names = (x.count, x.dtype), (x.what, y.what)

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
        x, y = kept
        factors = zip(names, (y, x), strict=True)
        return tuple(m.run("mul", (gradient, other), *like, f"gradient of {name}") for name, other in factors)

    output = m.run("mul", (x, y), *like, what)
    return m.node((x.slot, y.slot), (x, y), backward).gives(output)


def cross_entropy(m: Machine, logits: Tensor) -> Tensor:
    """Mean of -log softmax at the targets.

    log_softmax saves its output; nll_loss saves its input, under autocast an fp32 copy.
    """
    low_precision = _log_softmax(m, logits)
    log_probabilities = m.cast(low_precision, FP32 if m.autocast else None)
    like, named = (log_probabilities.count, log_probabilities.dtype), log_probabilities.what
    loss = m.new(m.sizes.one, log_probabilities.dtype, "loss")
    total_weight = m.new(m.sizes.one, log_probabilities.dtype, "number of targets")
    kept = (log_probabilities, total_weight)
    # One log probability and one target a token are read; the gradient is written whole.
    picked_bytes = m.sizes.tokens.value * (INT64.num_bytes + log_probabilities.dtype.num_bytes)

    m.ran("nll_loss_forward", (), (loss, total_weight), also_read_bytes=picked_bytes)

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor]:
        name = f"gradient of {named}"
        return (m.run("nll_loss_backward", (gradient,), *like, name, also_read_bytes=picked_bytes),)

    return m.node((log_probabilities.slot,), kept, backward).gives(loss)


def _log_softmax(m: Machine, logits: Tensor) -> Tensor:
    output = m.run("_log_softmax", (logits,), logits.count, logits.dtype, "log probabilities")
    return m.made_from(logits, output, "_log_softmax_backward_data", (output,), what="gradient of the logits")


def _gradient_of(m: Machine, weight: Parameter) -> Tensor:
    return m.new(weight.tensor.count, weight.tensor.dtype, f"gradient of {weight.name}")


def gather(m: Machine, x: Tensor) -> Tensor:
    """All-gather the tokens under sequence parallelism; backward reduce-scatters the gradient.

    Without it each rank has all tokens, and backward's sum is in place.
    """
    return _exchanged(m, x, _gathered, _scattered)


def scatter(m: Machine, x: Tensor) -> Tensor:
    """Reduce-scatter the tokens under sequence parallelism; backward all-gathers the gradient.

    Without it the sum is in place.
    """
    return _exchanged(m, x, _scattered, _gathered)


Exchange = Callable[[Machine, Tensor], Tensor]


def _exchanged(m: Machine, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
    if not m.sizes.split_tokens:
        return x
    made = forward(m, x)
    return m.node((x.slot,), (), lambda m, kept, gradient: (backward(m, gradient),)).gives(made)


def _gathered(m: Machine, x: Tensor) -> Tensor:
    received = m.new(m.sizes.gathered, x.dtype, f"{x.what}, received", category="temporaries")
    return m.run("cat", (received,), m.sizes.gathered, x.dtype, f"{x.what}, of all ranks")


def _scattered(m: Machine, x: Tensor) -> Tensor:
    to_send = m.run("cat", (x,), m.sizes.gathered, x.dtype, f"{x.what}, to send")
    return m.new(m.sizes.stream, to_send.dtype, f"{x.what}, summed over ranks")
