"""Describes the output head with the loss in chunks: ops/cross_entropy, line by line.

Forward computes and saves the gradients of the last hidden state and the head's weight. Each function ends where
torch's does, to free its tensors at the same moment.
"""

from functools import partial

from steplab.costs.kernel_time import Product
from steplab.ops.triton_places import ROW_MULTIPLE, Implementation, chunk_tokens, padded_entries, whole_entries
from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.sizes import BOOL, FP16, FP32, INT64, Count
from steplab.plan.dry_run.tensors import Tensor


def head_loss(m: Machine, x: Tensor, weight: Parameter, row: Implementation, *, scaled: bool) -> Tensor:
    """Mean loss, computed with the output head in chunks of tokens.

    scaled: True if backward receives a gradient other than 1, by which it multiplies all gradients.
    """
    if m.tape is None:
        return _mean(m, _in_chunks(m, x, weight, row)[0])
    scale, rest = _scales(m)
    losses, gradients = _in_chunks(m, x, weight, row)
    kept = (*gradients, *rest)
    backward = partial(_backward, scaled=scaled or not row.in_kernel)
    node = m.node((x.slot, weight.slot), kept, backward)
    loss = _mean(m, losses)
    del scale, losses
    return node.gives(loss)


def _backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor, *, scaled: bool) -> tuple[Tensor, ...]:
    gradients, rest = kept[:2], kept[2:]
    factor = m.run("mul", (gradient, *rest), m.sizes.one, FP32, "factor of the gradients") if rest else gradient
    if scaled:
        for each in gradients:
            m.ran("mul", (each, factor), (each,))
    return gradients


def _scales(m: Machine) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Forward's factor of the gradients, and backward's: forward divides by the number of targets, but in fp16, which
    cannot hold the gradients of a mean, backward does.
    """
    one = m.run("fill", (), m.sizes.one, FP32, "one")
    count = _num_targets(m)
    count = m.run("clamp", (count,), m.sizes.one, INT64, "number of targets, at least 1")
    share = m.run("div", (one, count), m.sizes.one, FP32, "a token's share of the mean")
    return (one, (share,)) if m.product_dtype is FP16 else (share, ())


def _num_targets(m: Machine) -> Tensor:
    tokens_bytes = m.sizes.tokens.value * INT64.num_bytes
    counted = m.run("ne", (), m.sizes.tokens, BOOL, "targets that count", also_read_bytes=tokens_bytes)
    return m.run("sum", (counted,), m.sizes.one, INT64, "number of targets")


def _mean(m: Machine, losses: Tensor) -> Tensor:
    total = m.run("sum", (losses,), m.sizes.one, FP32, "sum of the losses")
    return m.run("div", (total, _num_targets(m)), m.sizes.one, FP32, "loss")


def _in_chunks(m: Machine, x: Tensor, weight: Parameter, row: Implementation) -> tuple[Tensor, tuple[Tensor, ...]]:
    sizes, dtype, w = m.sizes, m.product_dtype, weight.tensor
    losses = m.new(sizes.tokens, FP32, "losses of the tokens")
    gradients: tuple[Tensor, ...] = ()
    if m.tape is not None:
        of_weight = m.new(w.count, w.dtype, f"gradient of {weight.name}", category="gradients")
        gradients = m.new(x.count, x.dtype, f"gradient of {x.what}"), of_weight
    if x.dtype is not dtype:
        x = m.copy(x, dtype)
    if w.dtype is not dtype:
        w = m.copy(w, dtype)
        w.storage.piece.category = "autocast_copies"
    entries, tokens = sizes.shape.vocab_size, sizes.tokens.value
    step = chunk_tokens(tokens, entries, dtype.num_bytes)
    padded = padded_entries(entries)
    cut = _cut(m, w)
    memory = m.new(Count(step * padded, f"{step} {padded}"), dtype, "logits of a chunk")
    m.start_products()
    for start in range(0, tokens, step):
        _chunk(m, x, cut, memory, losses, gradients, row, count=min(step, tokens - start), is_first=start == 0)
    return losses, gradients


def _cut(m: Machine, w: Tensor) -> list[tuple[int, Tensor]]:
    width, entries = m.sizes.shape.d_model, m.sizes.shape.vocab_size
    whole = whole_entries(entries)
    found = [(whole, _part(w, whole * width))] if whole else []
    if whole < entries:
        filled_up = Count(ROW_MULTIPLE * width, f"{ROW_MULTIPLE} d")
        found.append((entries - whole, m.run("copy", (), filled_up, w.dtype, "last rows of the head's weight")))
    return found


def _chunk(
    m: Machine,
    x: Tensor,
    cut: list[tuple[int, Tensor]],
    memory: Tensor,
    losses: Tensor,
    gradients: tuple[Tensor, ...],
    row: Implementation,
    *,
    count: int,
    is_first: bool,
) -> None:
    """Three matmuls for `count` tokens, split as the vocabulary is, with softmax, loss and gradient between.

    Padding of the parts is not counted.
    """
    width, part = m.sizes.shape.d_model, _part(x, count * m.sizes.shape.d_model)
    for entries, w in cut:
        m.ran("mm", (part, w), (_part(memory, count * entries),), product=Product(m=count, n=entries, k=width))
    logits = _part(memory, count * m.sizes.shape.vocab_size)
    if row.in_kernel:
        m.ran("cross_entropy_softmax", (logits,), (logits, _part(losses, count)))
    else:
        _plain_rows(m, logits, Count(count, str(count)), has_gradient=bool(gradients))
    for index, (entries, w) in enumerate(cut if gradients else []):
        of_logits = _part(memory, count * entries)
        of_x, of_w = _part(gradients[0], count * width), _part(gradients[1], entries * width)
        added_to = (of_x,) if index else ()
        m.ran("mm", (of_logits, w, *added_to), (of_x,), product=Product(m=count, n=width, k=entries))
        added_to = () if is_first else (of_w,)
        sizes_of_w = Product(m=entries, n=width, k=count, transposed=True)
        m.ran("mm", (of_logits, part, *added_to), (of_w,), product=sizes_of_w)


def _plain_rows(m: Machine, logits: Tensor, rows: Count, *, has_gradient: bool) -> None:
    wide = logits if logits.dtype is FP32 else m.run("copy", (logits,), logits.count, FP32, "logits, in fp32")
    m.run("amax", (wide,), rows, FP32, "largest logits")
    exponentials = m.run("sub", (wide,), logits.count, FP32, "exponentials of logits")
    m.ran("exp", (exponentials,), (exponentials,))
    m.run("sum", (exponentials,), rows, FP32, "sums of exponentials")
    if has_gradient:
        for name in ("mul", "mul", "masked_fill"):
            m.ran(name, (exponentials,), (exponentials,))
        m.ran("copy", (exponentials,), (logits,))


def _part(x: Tensor, num_elements: int) -> Tensor:
    return Tensor(Count(num_elements, str(num_elements)), x.dtype, x.storage)
