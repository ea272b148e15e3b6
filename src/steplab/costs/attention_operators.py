"""FLOPs and bytes of fused attention operators, torch's and steplab's own.

FLOPs are those of an attention that skips what its mask hides: 4 B H S K D forward for S queries and K keys, half of it
if causal, and 2.5 times as much backward, because it has five products where forward has two (Dao 2023,
"FlashAttention-2", section 4.1). Bytes: queries, keys, values and output once, and in the backward pass their gradients
once.
"""

from collections.abc import Sequence

from steplab.costs.operators import Cost, Tensor
from steplab.ops.attention.implementations import TABLE
from steplab.specs.attention import AttentionSpec

BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass as a multiple of the forward pass's."""


_FUSED = {operator.name: operator for row in TABLE for operator in row.operators}
FUSED_ATTENTION = frozenset(_FUSED)
"""Names of the operators whose cost depends on an argument that is not a tensor."""
_YES, _NO = ("True", "1", "2"), ("False", "0")
"""The efficient kernel's mask is a number: 0 none, 1 and 2 causal, aligned to the first or to the last key."""


def fused_attention_cost(name: str, tensors: Sequence[Tensor], scalars: Sequence[str]) -> Cost | None:
    """Cost of a call; `scalars` has the text of each argument, '' for a tensor.

    Returns None if the tensors are not those of an attention; a cost without FLOPs if the causal flag is unknown.
    """
    known = _FUSED[name]
    try:
        q, k = tensors[known.backward : known.backward + 2]
        batch, *middle, width = q.shape
        queries, heads = middle if known.heads_last else reversed(middle)
        keys = k.shape[1 if known.heads_last else 2]
    except (ValueError, IndexError):  # fewer tensors, or of another rank
        return None
    flops = 4.0 * batch * heads * queries * keys * width * (BACKWARD_FLOPS if known.backward else 1)
    flag = scalars[known.causal] if known.causal < len(scalars) else ""
    share = 0.5 if flag in _YES else 1.0 if flag in _NO else None
    written = 3 if known.backward else 1  # as large as queries, keys and values; no more is known of them
    moved = sum(tensor.size_bytes for tensor in tensors) + written * q.size_bytes
    return Cost(flops=None if share is None else share * flops, moved_bytes=moved)


def attention_flops(spec: AttentionSpec) -> dict[str, float]:
    """FLOPs of an attention by itself, by pass: forward, backward, both; independent of the implementation, which may
    execute more (masked scores) or less (nothing is recomputed). `heads` are those of the queries."""
    forward = 4.0 * spec.batch * spec.heads * spec.queries * spec.num_keys * spec.dim
    if spec.causal:
        forward /= 2
    return {"forward": forward, "backward": BACKWARD_FLOPS * forward, "both": (1 + BACKWARD_FLOPS) * forward}
