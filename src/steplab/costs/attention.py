"""FLOPs of an attention by itself, as papers count them: independent of the implementation.

forward 4 B H Sq Sk D (two products, a multiply-add counts as two), half of it if causal; backward 2.5 times as much,
because it has five products where forward has two (Dao 2023, "FlashAttention-2", section 4.1); both together 3.5 times.
Heads are those of the queries. An implementation may execute more (masked scores are computed) or less (nothing is
recomputed).
"""

from steplab.costs.attention_operators import BACKWARD_FLOPS
from steplab.specs.attention import AttentionSpec


def attention_flops(spec: AttentionSpec) -> dict[str, float]:
    """FLOPs by pass: forward, backward, both."""
    forward = 4.0 * spec.batch * spec.heads * spec.queries * spec.num_keys * spec.dim
    if spec.causal:
        forward /= 2
    return {"forward": forward, "backward": BACKWARD_FLOPS * forward, "both": (1 + BACKWARD_FLOPS) * forward}
