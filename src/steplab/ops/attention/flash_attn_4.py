"""The flash-attn-4 package, where it is installed: FlashAttention-4, for Hopper and Blackwell GPUs."""

from importlib import import_module
from typing import Any

from torch import Tensor

from ..errors import Unsupported
from .autocast import as_autocast_would
from .shapes import refuse_unserved


def flash_attn_4_attention(
    q_BHSD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(scale * q k^T) v by flash_attn.cute.flash_attn_func, which has the heads after the positions.

    Raises Unsupported without the package, or for inputs that it does not take.
    """
    q_BHSD, k_BHKD, v_BHKD = as_autocast_would(q_BHSD, k_BHKD, v_BHKD)
    refuse_unserved("flash_attn_4", q_BHSD, k_BHKD, causal=causal)
    attend = _flash_attn_func()
    heads_last = (x.transpose(1, 2) for x in (q_BHSD, k_BHKD, v_BHKD))
    result = attend(*heads_last, softmax_scale=scale, causal=causal)
    # Some versions give the log-sum-exp too.
    o_BSHD: Tensor = result[0] if isinstance(result, tuple) else result
    return o_BSHD.transpose(1, 2)


def _flash_attn_func() -> Any:
    try:
        flash_attn_func = import_module("flash_attn.cute").flash_attn_func
    except ImportError as error:
        why = f"flash-attn-4 cannot be imported ({error})"
        raise Unsupported("attention 'flash_attn_4'", why, "pip install flash-attn-4") from None
    return flash_attn_func
