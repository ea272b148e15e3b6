"""Names the tensor of an allocation from its shape, module and operator, where these leave no doubt.

The names are those of the plain Transformer's sizes (batch, context, width, ...). A shape that two of its tensors share
is described as a shape.
"""

from collections.abc import Sequence
from math import prod

from steplab.records.memory_profile import Allocation, SavedTensors, tensor_bytes
from steplab.specs.model import TransformerShape
from steplab.specs.step import StepSpec

_SCORES = {
    "bmm": "products of queries and keys",
    "baddbmm": "products of queries and keys",
    "matmul": "products of queries and keys",
    "mul": "scaled attention scores",
    "div": "scaled attention scores",
    "masked_fill": "masked attention scores",
    "where": "masked attention scores",
    "_softmax": "attention weights (softmax of the scores)",
    "_softmax_backward_data": "gradient of the attention scores",
}
_LOGITS = {
    "mm": "logits",
    "linear": "logits",
    "_log_softmax": "log-probabilities of the loss",
    "_log_softmax_backward_data": "gradient of the logits",
}


_BY_OPERATOR = {"scores": _SCORES, "logits": _LOGITS}
_SIZES = {"scores": "attention scores", "logits": "logits"}
_WIDTHS = {"width": "width of the residual stream", "inner width": "inner width of the feed-forward"}


def what_it_is(made: Allocation, spec: StepSpec | None) -> str | None:
    """Name of the tensor in a few words; None where it is not certain."""
    sizes = spec.model.shape if spec else None
    if spec is None or sizes is None or made.shape is None:
        return None
    kind = _kind(made.shape, spec, sizes)
    if kind in _SIZES:
        words = _BY_OPERATOR[kind].get(_last(made.op))
        if words is None or (made.phase == "backward" and "gradient" not in words and made.op != "aten::_softmax"):
            return f"a tensor of the size of the {_SIZES[kind]}"
        return words
    if made.category in _WEIGHTS:
        return _weight(made, sizes)
    return f"a tensor of the {_WIDTHS[kind]}" if kind else None


def _kind(shape: Sequence[int], spec: StepSpec, sizes: TransformerShape) -> str | None:
    """What has such a shape: 'scores', 'logits', or activations of the model's 'width' or 'inner width'.

    None for other sizes, and where two of the model's sizes are equal.
    """
    if is_scores(shape, spec, sizes):
        return "scores"
    if len(shape) < 2 or prod(shape[:-1]) != spec.tokens:
        return None
    if shape[-1] == sizes.vocab_size and sizes.vocab_size not in (sizes.d_model, sizes.d_ff):
        return "logits"
    names = {sizes.d_model: "width", sizes.d_ff: "inner width", sizes.vocab_size: None}
    return names.get(shape[-1]) if len(names) == 3 else None


def _last(op: str | None) -> str:
    """Operator without namespace, overload and trailing underscore: mul for aten::mul_ and aten::mul.Tensor."""
    return (op or "").rpartition("::")[2].partition(".")[0].rstrip("_")


def is_scores(shape: Sequence[int], spec: StepSpec, sizes: TransformerShape) -> bool:
    """Whether a tensor has the shape of the attention scores: batch × heads × context × context in 3 or 4 dimensions.

    False where queries, keys and values, or their halves in the rotary embedding, have the same shape.
    """
    square = len(shape) in (3, 4) and tuple(shape[-2:]) == (spec.context, spec.context)
    if not square or not sizes.num_heads or prod(shape[:-2]) != spec.batch * sizes.num_heads:
        return False
    of_one_head = (sizes.d_ff, sizes.vocab_size) if sizes.num_heads == 1 else ()
    return spec.context not in (sizes.head_dim, sizes.head_dim // 2, *of_one_head)


_WEIGHTS = {
    "parameters": "{}",
    "gradients": "gradient of {}",
    "optimizer_state": "optimizer state of {}",
    "autocast_copies": "low-precision copy of {}",
}
"""How an allocation of a category is named by the weights whose shape it has."""


def _weight(made: Allocation, sizes: TransformerShape) -> str | None:
    """Name of the weights that have an allocation's shape; None if several kinds of weights have it."""
    of = {
        "the embedding or the head": {(sizes.vocab_size, sizes.d_model)},
        "a feed-forward weight": {
            *((width, sizes.d_model) for width in _inner_widths(sizes)),
            (sizes.d_model, sizes.d_ff),
        },
        "an attention projection": {(width, sizes.d_model) for width in _projected_widths(sizes)},
    }
    fitting = [name for name, shapes in of.items() if made.shape in shapes]
    return _WEIGHTS[made.category].format(fitting[0]) if len(fitting) == 1 else None


def derivation(shape: Sequence[int], dtype: str | None, spec: StepSpec | None) -> str | None:
    """'batch x heads x context x context x bytes of float32 = 4 x 12 x 512 x 512 x 4'; None for an unknown dtype.

    Where the spec does not identify the dimensions, the figures stand alone.
    """
    size = tensor_bytes(shape, dtype)
    if size is None or not shape:
        return None
    per_element = size // prod(shape) if prod(shape) else 0
    figures = " × ".join(f"{n}" for n in (*shape, per_element))
    names = _names(shape, spec)
    if names is None:
        return f"{figures} ({dtype})"
    return f"{' × '.join(names)} × bytes of {dtype} = {figures}"


def _names(shape: Sequence[int], spec: StepSpec | None) -> list[str] | None:
    if spec is None:
        return None
    sizes = spec.model.shape
    by_token = len(shape) == 3 and tuple(shape[:2]) == (spec.batch, spec.context)
    if sizes is None:
        return ["batch", "context", "width"] if by_token else None
    kind = _kind(shape, spec, sizes)
    if kind == "scores":
        return [*(("batch", "heads") if len(shape) == 4 else ("(batch × heads)",)), "context", "context"]
    if kind is None or not (by_token or len(shape) == 2):
        return None
    tokens = ["batch", "context"] if by_token else ["(batch × context)"]
    return [*tokens, "vocabulary" if kind == "logits" else kind]


def node_name(op: str) -> str:
    """Operator of a backward node: Softmax for SoftmaxBackward0; '' if no node saved the tensor."""
    return op.rstrip("0123456789").removesuffix("Backward")


def is_checkpointed(spec: StepSpec | None) -> bool:
    """Whether a step recomputes activations; tensors that no node saved are then inputs of the recomputation."""
    return spec is not None and spec.checkpointing != "none" and spec.checkpoints_apply


def is_compiled(tensors: SavedTensors) -> bool:
    """Whether a compiled graph saved the tensors; its modules and operators are not known."""
    return node_name(tensors.op) == "CompiledFunction"


def _projected_widths(sizes: TransformerShape) -> set[int]:
    """Widths of what attention's linear layers give."""
    if not sizes.num_heads:
        return set()
    widths = sizes.query_key_value_widths
    return {sizes.d_model, sum(widths)} if sizes.projections == "merged" else set(widths)


def _inner_widths(sizes: TransformerShape) -> set[int]:
    """Widths of what a feed-forward block's first linear layers give."""
    *wide, _ = sizes.feed_forward_layers
    return {len(wide) * sizes.d_ff if sizes.projections == "merged" else sizes.d_ff}


def is_weight_shape(shape: Sequence[int], spec: StepSpec | None) -> bool | None:
    """Whether a tensor has the shape of one of the model's weights or of its transpose.

    None where an activation has the same shape, and for a model of unknown sizes.
    """
    sizes = spec.model.shape if spec else None
    if spec is None or sizes is None:
        return None
    others = {sizes.d_model, sizes.vocab_size, sizes.d_ff} | _inner_widths(sizes) | _projected_widths(sizes)
    weights = [{sizes.d_model, other} for other in others]
    if len(shape) != 2 or set(shape) not in weights:
        return False
    return None if spec.tokens in shape else True


def _shape_words(tensors: SavedTensors, spec: StepSpec | None) -> str | None:
    """Name of saved tensors by their shape alone; None if several kinds of tensors have it, or none has."""
    sizes = spec.model.shape if spec else None
    if spec is None or sizes is None:
        return None
    kind = _kind(tensors.shape, spec, sizes)
    if kind != "scores" and is_weight_shape(tensors.shape, spec):
        return "weights"
    return (_SIZES | _WIDTHS)[kind] if kind else None


def saved_by(tensors: SavedTensors, spec: StepSpec | None) -> str:
    """Saved tensors in a few words: 'Mul in blocks.*.feed_forward', 'Embedding outside of modules'."""
    node = node_name(tensors.op) or ("checkpointing" if is_checkpointed(spec) else "a tensor")
    if is_compiled(tensors):
        words = _shape_words(tensors, spec)
        size = " × ".join(map(str, tensors.shape)) or "scalar"
        return f"{size} {tensors.dtype}{f' ({words})' if words else ''}"
    where = f"in {tensors.module}" if tensors.module else "outside of modules"
    where += f" ({tensors.category.replace('_', ' ')})" if tensors.category != "activations" else ""
    shape = spec.model.shape if spec else None
    if spec and shape and node == "Softmax" and is_scores(tensors.shape, spec, shape):
        return f"attention weights {where}"
    return f"{node} {where}"
