"""How many parameters the plain Transformer has, by closed form."""

from steplab.specs.model import TransformerShape


def num_parameters(shape: TransformerShape) -> int:
    """All parameters: per block four projections, three feed-forward matrices and two norms; embedding, head
    and final norm once. Without heads (planning only): two feed-forward matrices a block, nothing else."""
    if shape.num_heads == 0:
        return shape.num_layers * 2 * shape.d_model * shape.d_ff
    block = 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff + 2 * shape.d_model
    return shape.num_layers * block + 2 * shape.vocab_size * shape.d_model + shape.d_model


def num_embedding_parameters(shape: TransformerShape) -> int:
    """Parameters of the token embedding, which are looked up and cost no FLOPs."""
    return shape.vocab_size * shape.d_model
