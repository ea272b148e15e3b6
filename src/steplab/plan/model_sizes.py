"""A model's sizes, as accountings use them."""

from dataclasses import dataclass

from steplab.costs.flops import num_attention_weights, num_feed_forward_weights, num_parameters
from steplab.specs.model import TransformerShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    width: int
    inner: int
    num_layers: int
    num_parameters: int
    num_active: int
    """Parameters that one token uses: all but the experts that it does not take."""
    matrices: int
    kinds: str
    key_width: int
    """Width of keys; 0: no attention."""
    plain_layers: int = 0
    """Matrices of a block that is only a feed-forward block."""
    experts: tuple[int, int] | None = None
    """Number of experts of a block, and of those that a token takes; None: no experts."""


def sizes_of(shape: TransformerShape) -> Sizes:
    number = len(shape.feed_forward_layers)
    return Sizes(
        width=shape.d_model,
        inner=shape.d_ff,
        num_layers=shape.num_layers,
        num_parameters=num_parameters(shape),
        num_active=num_parameters(shape),
        matrices=num_attention_weights(shape) + num_feed_forward_weights(shape),
        kinds=f"{number} of its feed-forward part" + (", 4 of its attention" if shape.num_heads else ""),
        key_width=shape.kv_width if shape.num_heads else 0,
        plain_layers=0 if shape.num_heads else number,
    )
