"""The sizes of a model in the formulas of plan.accounting."""

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
    """Parameters that compute one token, without experts that it is not routed to."""
    matrices: int
    kinds: str
    key_width: int
    """Width of the key projection; 0: the model has no attention."""
    plain_layers: int = 0
    """Number of matrices in a block of a model without attention; 0: the model has attention."""
    experts: tuple[int, int] | None = None
    """(experts in a block, experts per token); None: the model has no experts."""


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
