"""Attention as the formula reads, with the scores in memory: the reference, and the baseline of fusing."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

Span = Callable[[str], AbstractContextManager[object]]
"""span(name) marks the code inside `with` by a name, for a profiler."""


def no_span(name: str) -> AbstractContextManager[object]:
    return nullcontext()


def plain_attention(
    q_BHSD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    span: Span = no_span,
) -> Tensor:
    """softmax(scale * q k^T) v with every intermediate materialised (Vaswani et al. 2017, equation 1).

    Spans: "scores" (product, scale and mask), "softmax" and "values". Keys and values of grouped-query heads are
    repeated. A row with only -inf scores gives NaN; fused implementations give zeros.
    """
    if k_BHKD.dim() > 2 and k_BHKD.shape[-3] != q_BHSD.shape[-3]:
        num_sharing = q_BHSD.shape[-3] // k_BHKD.shape[-3]
        k_BHKD, v_BHKD = (x.repeat_interleave(num_sharing, dim=-3) for x in (k_BHKD, v_BHKD))
    scale = 1 / math.sqrt(q_BHSD.shape[-1]) if scale is None else scale
    with span("scores"):
        scores_BHSK = q_BHSD @ k_BHKD.transpose(-2, -1) * scale
        if causal:
            num_queries, num_keys = scores_BHSK.shape[-2:]
            hidden_SK = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BHSD.device).triu(1)
            scores_BHSK = scores_BHSK.masked_fill(hidden_SK, float("-inf"))
    with span("softmax"):
        weights_BHSK = scores_BHSK.softmax(dim=-1)
    with span("values"):
        return (weights_BHSK @ v_BHKD).to(q_BHSD.dtype)
