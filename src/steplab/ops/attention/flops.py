"""FLOPs that attention needs, and torch's FLOP counter told of them for the operators defined here.

A multiply-add counts as two. Forward has two products over the pairs of a query and a key that it sees, S = Q K^T and
O = P V: 4 D a pair. Backward has five, S again, dP = dO V^T, dV = P^T dO, dQ = dS K and dK = dS^T Q: 10 D a pair (Dao
2023, "FlashAttention-2", section 4.1). The pairs that a causal mask hides are not counted, to the pair and not by
halving the square: torch's own fused operators count the whole square. A kernel that makes S and dP twice, once for dQ
and once for dK and dV, executes seven products backward and needs five: five are counted.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


def num_pairs(num_queries: int, num_keys: int, *, causal: bool) -> int:
    """Pairs of a query and a key that it sees: query i (from 0) sees keys 0 to i if causal, else all."""
    if not causal:
        return num_queries * num_keys
    square = min(num_queries, num_keys)
    return square * (square + 1) // 2 + (num_queries - square) * num_keys


def attention_flops(q_shape: Sequence[int], num_keys: int, *, causal: bool, num_products: int) -> int:
    """FLOPs of so many products for queries [B, H, S, D]."""
    batch, num_heads, num_queries, width = q_shape
    return 2 * num_products * batch * num_heads * width * num_pairs(num_queries, num_keys, causal=causal)


def _forward(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool, *args: object, **kwargs: object
) -> int:
    return attention_flops(q, k[2], causal=causal, num_products=FORWARD_PRODUCTS)


def _backward(
    do: Sequence[int],
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    o: Sequence[int],
    lse: Sequence[int],
    causal: bool,
    *args: object,
    **kwargs: object,
) -> int:
    return attention_flops(q, k[2], causal=causal, num_products=BACKWARD_PRODUCTS)


def register_formulas(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Tell torch's FlopCounterMode what a pair of operators needs."""
    register_flop_formula(forward)(_forward)
    register_flop_formula(backward)(_backward)
