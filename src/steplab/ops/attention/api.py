"""attention(): one signature over every implementation, chosen by name and never swapped silently.

Shape suffixes: B batch (any leading dimensions), H heads, S query positions, K key positions, D head dimension.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from steplab.errors import Unsupported
from steplab.ops.attention.plain import Span, no_span, plain_attention
from steplab.ops.attention.sdpa import SDPA_BACKENDS, sdpa_attention

AttentionFn = Callable[..., Tensor]
"""(q_BHSD, k_BHKD, v_BHKD, *, causal, scale=None) -> o_BHSD"""

IMPLEMENTATIONS: dict[str, AttentionFn] = {
    "plain": plain_attention,
    "sdpa": sdpa_attention,
    **{f"sdpa_{name}": partial(sdpa_attention, backend=name) for name in SDPA_BACKENDS},
}


def attention_named(implementation: str, *, span: Span = no_span) -> AttentionFn:
    """The function behind a name; raises Unsupported, listing the names there are.

    `span` marks the parts of plain attention for a profiler; the fused ones have no parts to be seen from here.
    """
    if implementation == "plain" and span is not no_span:
        return partial(plain_attention, span=span)
    try:
        return IMPLEMENTATIONS[implementation]
    except KeyError:
        raise Unsupported(
            f"attention '{implementation}'",
            "no such implementation",
            f"choose one of {', '.join(IMPLEMENTATIONS)}",
        ) from None


def attention(
    q_BHSD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    implementation: str = "plain",
) -> Tensor:
    """softmax(scale * q k^T) v, by the named implementation.

    causal hides keys after the query's own position, both counted from the first (as torch's is_causal does).
    scale defaults to 1 / sqrt(D). Gives a tensor of q's shape and dtype; raises Unsupported for a name that
    is not known.
    """
    return attention_named(implementation)(q_BHSD, k_BHKD, v_BHKD, causal=causal, scale=scale)
