"""FLOPs of a training step, under each convention in use. A multiply-add counts as two.

N parameters, E of them in the embedding look-up, L layers, d attention width, T context. Forward takes a third of
forward + backward, because the backward pass has two products for each of the forward's.

    causal   6 (N - E) +  6 L d T   a token: only the work a causal model needs (the default here)
    full     6 (N - E) + 12 L d T   the whole T x T square of scores (torchtitan, nanoGPT)
    params   6 N                    the rule of thumb (Kaplan et al. 2020)

Elementwise work, norms, softmax and the optimizer are not counted: they use no matrix unit.

The file also has the plain Transformer's number of parameters.
"""

from typing import Literal, TypedDict, Unpack, get_args

from steplab.costs.weights import PartName, elements, weights_of
from steplab.ops.attention.implementations import implementation
from steplab.specs.checkpointing import num_recomputed
from steplab.specs.model import TransformerShape
from steplab.specs.step import AUTOCAST, StepSpec


def num_parameters(shape: TransformerShape) -> int:
    """Number of the model's parameters; a tied weight counts once.

    Without heads (planning only), it counts only matrices of the feed-forward blocks.
    """
    if shape.num_heads == 0:
        return shape.num_layers * num_feed_forward_weights(shape)
    embedding, block, head = (elements(weights_of(shape, part, 1)) for part in get_args(PartName))
    return embedding + shape.num_layers * block + head


def num_embedding_parameters(shape: TransformerShape) -> int:
    """Number of parameters that are looked up and cost no FLOPs: learned positions, and the token embedding unless it
    is also the head's weight.
    """
    tokens = 0 if shape.head == "tied" else shape.vocab_size
    return (tokens + shape.learned_positions) * shape.d_model


def num_attention_weights(shape: TransformerShape) -> int:
    return 2 * shape.d_model * (shape.d_model + shape.kv_width) if shape.num_heads else 0


def num_feed_forward_weights(shape: TransformerShape) -> int:
    return len(shape.feed_forward_layers) * shape.d_model * shape.d_ff


Convention = Literal["causal", "full", "params"]

DTYPE_OF_MATMULS = {"fp32": "fp32", "tf32": "tf32", **AUTOCAST, "bf16_pure": "bf16"}
"""Maps a step's precision to the data type of its matmuls, which selects the peak for MFU."""


class ModelSizes(TypedDict):
    num_parameters: int
    num_embedding_parameters: int | None
    num_layers: int | None
    attention_width: int | None


def model_flops_per_token(
    convention: Convention, *, context: int, backward: bool, **sizes: Unpack[ModelSizes]
) -> float | None:
    """FLOPs that a token needs under a convention; None if the convention uses a size that is None."""
    passes = 3 if backward else 1
    if convention == "params":
        return passes * 2.0 * sizes["num_parameters"]
    work = _forward_work(context, sizes)
    if work is None:
        return None
    linear, product = work
    return passes * (linear + (2 if convention == "full" else 1) * product)


def _forward_work(context: int, sizes: ModelSizes) -> tuple[float, float] | None:
    """FLOPs per token, forward, of the linear layers and of one of attention's two products over the whole square.

    None if a size is None.
    """
    embedding, num_layers, width = sizes["num_embedding_parameters"], sizes["num_layers"], sizes["attention_width"]
    if embedding is None or num_layers is None or width is None:
        return None
    return 2.0 * (sizes["num_parameters"] - embedding), 2.0 * num_layers * width * context


def executed_flops_per_token(spec: StepSpec, is_causal: bool = True, /, **sizes: Unpack[ModelSizes]) -> float | None:
    """Matmul FLOPs that are executed per token, recomputation included: the numerator of HFU.

    Attention with materialised scores takes two products forward and four backward, over the whole square. A fused
    kernel skips the masked half but recomputes scores backward: five products (Dao 2023, section 3.1). `sdpa` is
    assumed to choose one. None if a size is None, or if checkpointing recomputes another library's blocks.
    """
    work, num_layers = _forward_work(spec.context, sizes), sizes["num_layers"]
    if work is None or num_layers is None:
        return None
    linear, product = work
    materialised = implementation(spec.attention).materialises_scores
    if not materialised and is_causal:
        product /= 2
    flops = linear + 2 * product
    if spec.pass_name != "forward":
        flops += 2 * linear + (4 if materialised else 5) * product
    if spec.checkpoints_apply and spec.checkpointing != "none":
        if spec.model.shape is None:
            return None
        recomputed = num_recomputed(spec.checkpointing, num_layers)
        flops += recomputed * (_recomputed_linear(spec.model.shape) + 2 * product / num_layers)
        if spec.checkpointing == "selective_2":
            flops += num_layers * _every_second_linear(spec.model.shape)
    return flops


def _recomputed_linear(shape: TransformerShape) -> float:
    """FLOPs per token of the linear layers that a checkpointed block reruns: all except the last, which torch and
    compilers skip.
    """
    last = shape.d_model * shape.d_ff
    return 2.0 * (num_attention_weights(shape) + num_feed_forward_weights(shape) - last)


def _every_second_linear(shape: TransformerShape) -> float:
    """FLOPs per token of every second linear layer of a block."""
    of_input, inner = list(shape.query_key_value_widths), [shape.d_ff] * (len(shape.feed_forward_layers) - 1)
    output = of_input[:1]
    if shape.projections == "merged":
        of_input, inner = [sum(of_input)], [sum(inner)]
    return 2.0 * shape.d_model * sum([*of_input, *output, *inner][1::2])
