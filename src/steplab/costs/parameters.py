"""The number of parameters of the plain Transformer, by closed form."""

from steplab.specs.model import TransformerShape


def num_parameters(shape: TransformerShape) -> int:
    """All parameters, a tied weight counted once: the blocks', the final norm's, the embeddings' and the head's.
    Without heads (planning only): only the matrices of the feed-forward blocks."""
    d, vocabulary = shape.d_model, shape.vocab_size * shape.d_model
    matrices = num_attention_weights(shape) + num_feed_forward_weights(shape)
    if shape.num_heads == 0:
        return shape.num_layers * matrices
    norm = d * (2 if shape.has_norm_biases else 1)
    block = matrices + 2 * norm + _num_biases(shape)
    heads = 0 if shape.head == "tied" else vocabulary
    return shape.num_layers * block + norm + vocabulary + heads + shape.learned_positions * d


def num_embedding_parameters(shape: TransformerShape) -> int:
    """Parameters that are looked up and cost no FLOPs: learned positions, and the token embedding unless it is also the
    head's weight."""
    tokens = 0 if shape.head == "tied" else shape.vocab_size
    return (tokens + shape.learned_positions) * shape.d_model


def num_attention_weights(shape: TransformerShape) -> int:
    """Elements of a block's four projections: to queries, keys and values, and of the output."""
    return 2 * shape.d_model * (shape.d_model + shape.kv_width) if shape.num_heads else 0


def num_feed_forward_weights(shape: TransformerShape) -> int:
    """Elements of the matrices of a feed-forward block."""
    return len(shape.feed_forward_layers) * shape.d_model * shape.d_ff


def _num_biases(shape: TransformerShape) -> int:
    if shape.biases == "none":
        return 0
    projections = shape.d_model + 2 * shape.kv_width
    if shape.biases == "qkv":
        return projections
    return projections + shape.d_model + (len(shape.feed_forward_layers) - 1) * shape.d_ff + shape.d_model
