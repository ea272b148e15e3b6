"""FLOPs and bytes of fused attention operators, torch's and steplab's own.

FLOPs as for an attention that skips what its mask hides: 4 B H S K D forward for S queries and K keys, half of it if
causal, and 2.5 times as much backward, whose five products are for two forward (Dao 2023, "FlashAttention-2", section
4.1). Bytes: queries, keys, values and output, and backward their gradients, each once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from steplab.costs.operators import Cost, Tensor

BACKWARD_FLOPS = 2.5
"""Times the forward pass's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fused:
    """Where an operator has what decides its cost."""

    causal: int
    """Position of the causal flag, or of the kind of mask, among all arguments."""
    heads_last: bool = False
    """Whether tensors are [B, S, H, D] and not [B, H, S, D]."""
    backward: bool = False
    """Whether the output's gradient comes first, and gradients of queries, keys and values go out."""


_FUSED = {
    "aten::_flash_attention_forward": _Fused(causal=8, heads_last=True),
    "aten::_flash_attention_backward": _Fused(causal=11, heads_last=True, backward=True),
    "aten::_efficient_attention_forward": _Fused(causal=9, heads_last=True),
    "aten::_efficient_attention_backward": _Fused(causal=14, heads_last=True, backward=True),
    "aten::_cudnn_attention_forward": _Fused(causal=10),
    "aten::_cudnn_attention_backward": _Fused(causal=14, backward=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Fused(causal=4),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _Fused(causal=7, backward=True),
    "steplab::flash_triton_forward": _Fused(causal=3),
    "steplab::flash_triton_backward": _Fused(causal=6, backward=True),
    "steplab::flash_reference_forward": _Fused(causal=3),
    "steplab::flash_reference_backward": _Fused(causal=6, backward=True),
}
FUSED_ATTENTION = frozenset(_FUSED)
"""Names of the operators whose cost depends on an argument that is no tensor."""
_YES, _NO = ("True", "1", "2"), ("False", "0")
"""The efficient kernel's mask is a number: 0 none, 1 and 2 causal, aligned to the first or to the last key."""


def fused_attention_cost(name: str, tensors: Sequence[Tensor], scalars: Sequence[str]) -> Cost | None:
    """Cost of a call; `scalars` has the text of each argument, '' for a tensor.

    None where the tensors are not those of an attention; no FLOPs where the causal flag is not told.
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
    written = 3 if known.backward else 1  # as large as the queries, keys and values each; no more is known of them
    moved = sum(tensor.size_bytes for tensor in tensors) + written * q.size_bytes
    return Cost(flops=None if share is None else share * flops, moved_bytes=moved)
