"""attention(): one signature over every implementation, chosen by name and never swapped silently. Shape suffixes: B
batch (any leading dimensions), H heads, S query positions, K key positions, D head dimension."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from .choice_rule import Choice, choose
from .functions import FlashAttentionReference, FlashAttentionTriton
from .peers import SDPA_BACKENDS, flash_attn_4_attention, flex_attention_compiled, sdpa_attention
from .plain import Span, no_span, plain_attention
from .shapes import as_four_dims, autocast_dtype, check_inputs, fixed, num_key_heads
from .triton_tuning import hopper_kernels_on


def choice_for(q: Tensor, k: Tensor, *, causal: bool) -> Choice:
    return _choice(*_described(q, k, causal))


def _described(q: Tensor, k: Tensor, causal: bool) -> tuple[torch.device, torch.dtype, int, int, int, bool, bool]:
    dtype = autocast_dtype(q.device.type) or q.dtype
    grouped = q.dim() > 3 and num_key_heads(k) != q.shape[-3]
    return q.device, dtype, fixed(q.shape[-1]), fixed(q.shape[-2]), fixed(k.shape[-2]), grouped, causal


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name(*described: Any) -> str:
    return _choice(*described).implementation


@cache
def _choice(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    num_queries: int,
    num_keys: int,
    grouped: bool,
    causal: bool,
) -> Choice:
    return choose(
        device=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        head_dim=head_dim,
        num_queries=num_queries,
        num_keys=num_keys,
        causal=causal,
        grouped=grouped,
        hopper=hopper_kernels_on(device, head_dim),
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


AttentionFn = Callable[..., Tensor]
"""(q_BHSD, k_BHKD, v_BHKD, *, causal, scale=None) -> o_BHSD"""


def flash_attention(
    function: type[FlashAttentionReference | FlashAttentionTriton],
    q_BHSD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    return function.apply(*_apart(q_BHSD, k_BHKD, v_BHKD), causal, scale)


def _apart(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three distinct tensors, because torch.compile breaks its graph where a Function gets one tensor twice."""
    if not torch.compiler.is_compiling():
        return q, k, v
    return q, k.view_as(k) if k is q else k, v.view_as(v) if v is k or v is q else v


def auto_attention(
    q_BHSD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    attend = IMPLEMENTATIONS[_name(*_described(q_BHSD, k_BHKD, causal))]
    return attend(q_BHSD, k_BHKD, v_BHKD, causal=causal, scale=scale)


IMPLEMENTATIONS: dict[str, AttentionFn] = {
    "plain": plain_attention,
    "sdpa": sdpa_attention,
    **{f"sdpa_{name}": partial(sdpa_attention, backend=name) for name in SDPA_BACKENDS},
    "flex": flex_attention_compiled,
    "flash_reference": partial(flash_attention, FlashAttentionReference),
    "flash_triton": partial(flash_attention, FlashAttentionTriton),
    "flash_attn_4": flash_attn_4_attention,
    "auto": auto_attention,
}


def attention_named(implementation: str, *, span: Span = no_span) -> AttentionFn:
    """The attention function of this name, for [B, H, S, D] only. Raises Unsupported with a list of the names.

    `span` marks the parts of plain attention for a profiler; fused implementations have no visible parts.
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    implementation: str = "plain",
) -> Tensor:
    """softmax(scale * q k^T) v, computed by the named implementation.

    q is [..., H, S, D] with k and v [..., N, K, D], where N divides H (query head h reads key head h * N // H). [batch,
    S, D] is one head, [S, D] one sequence. There is no broadcasting. causal hides keys after the query's own position,
    both counted from the first. scale defaults to 1 / sqrt(D). The result has q's shape and dtype; under autocast its
    dtype is autocast's, except for plain.

    Raises UserError for other shapes and mixed types or devices, Unsupported for an unknown name and for inputs that
    the implementation does not support.
    """
    attend = attention_named(implementation)
    check_inputs(q, k, v)
    if q.dim() == 4:
        return attend(q, k, v, causal=causal, scale=scale)
    output = attend(as_four_dims(q), as_four_dims(k), as_four_dims(v), causal=causal, scale=scale)
    return output.reshape(q.shape)
