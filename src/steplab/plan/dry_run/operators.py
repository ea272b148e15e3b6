"""The operators of the model outside of attention: what each allocates, keeps, and makes and frees backwards.

A function holds its arguments until it returns, as torch's own do; in a backward function that is the gradient it took.
"""

from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.memory import Tensor
from steplab.plan.dry_run.sizes import FP32, Count


def embedding(m: Machine, weight: Parameter) -> Tensor:
    """Rows of the table. Keeps the tokens alone, which are there anyway."""
    x = m.new(m.sizes.residual, weight.tensor.dtype, "residual stream")
    m.node((weight.slot,), (), lambda m, kept, gradient: (_gradient_of(m, weight),)).gives(x)
    return x


def elementwise(m: Machine, x: Tensor, what: str, kept: tuple[Tensor, ...] = ()) -> Tensor:
    """A tensor like x, whose backward makes another."""
    like, named = (x.count, x.dtype), x.what
    output = m.new(*like, what)
    m.node((x.slot,), kept, lambda m, kept, gradient: (m.new(*like, f"gradient of {named}"),)).gives(output)
    return output


def linear(m: Machine, x: Tensor, weight: Parameter, out: Count, what: str) -> Tensor:
    """x W^T. Keeps both, in the format it multiplies them in."""
    w = m.weight(weight)
    x = m.cast(x, m.autocast)
    named = x.what

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = kept
        gradient_w = m.product(w.count, f"gradient of {weight.name}")
        gradient_x = m.product(x.count, f"gradient of {named}")
        gradient_x.is_view = True  # of the matrix that the product gave
        return gradient_x, gradient_w

    node = m.node((x.slot, w.slot), (x, w), backward)
    output = m.product(out, what)
    node.gives(output)
    return output


def rms_norm(m: Machine, x: Tensor, weight: Parameter, what: str) -> Tensor:
    """torch's fused kernel: keeps its input and one number a row.

    Autocast has a rule for it from torch 2.12 on, fp32. Of the residual stream, in the weight's format, that casts
    nothing: both are fp32 under autocast.
    """
    like, named = (x.count, x.dtype), x.what
    output = m.new(*like, what)
    reciprocal = m.new(m.sizes.tokens, FP32, "reciprocal root mean squares")

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, Tensor]:
        return m.new(*like, f"gradient of {named}"), _gradient_of(m, weight)

    m.node((x.slot, weight.slot), (x, reciprocal), backward).gives(output)
    return output


def add(m: Machine, x: Tensor, y: Tensor) -> Tensor:
    """The residual stream with a branch added to it, in the wider format. Keeps nothing; both gradients are its own."""
    output = m.new(x.count, x.dtype, "residual stream")
    m.node((x.slot, y.slot), (), lambda m, kept, gradient: (gradient, gradient)).gives(output)
    return output


def silu(m: Machine, x: Tensor) -> Tensor:
    """x sigmoid(x). Keeps x."""
    return elementwise(m, x, "silu of the gate", kept=(x,))


def multiply(m: Machine, x: Tensor, y: Tensor, what: str) -> Tensor:
    """Elementwise product of two tensors alike. Keeps both."""
    like, names = (x.count, x.dtype), (x.what, y.what)

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(m.new(*like, f"gradient of {name}") for name in names)

    output = m.new(*like, what)
    m.node((x.slot, y.slot), (x, y), backward).gives(output)
    return output


def cross_entropy(m: Machine, logits: Tensor) -> Tensor:
    """Mean of -log softmax at the targets. log_softmax keeps its output, and so does nll_loss its input: under
    autocast a copy of that in fp32."""
    low_precision = _log_softmax(m, logits)
    log_probabilities = m.cast(low_precision, FP32 if m.autocast else None)
    like, named = (log_probabilities.count, log_probabilities.dtype), log_probabilities.what
    loss = m.new(m.sizes.one, log_probabilities.dtype, "loss")
    total_weight = m.new(m.sizes.one, log_probabilities.dtype, "number of targets")
    kept = (log_probabilities, total_weight)
    m.node((log_probabilities.slot,), kept, lambda m, kept, gradient: (m.new(*like, f"gradient of {named}"),)).gives(
        loss
    )
    return loss


def _log_softmax(m: Machine, logits: Tensor) -> Tensor:
    like = (logits.count, logits.dtype)
    output = m.new(*like, "log probabilities")
    m.node((logits.slot,), (output,), lambda m, kept, gradient: (m.new(*like, "gradient of the logits"),)).gives(output)
    return output


def _gradient_of(m: Machine, weight: Parameter) -> Tensor:
    return m.new(weight.tensor.count, weight.tensor.dtype, f"gradient of {weight.name}")
