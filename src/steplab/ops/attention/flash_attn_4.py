"""The flash-attn-4 package, where it is installed: FlashAttention-4, for Hopper and Blackwell GPUs."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from steplab.errors import Unsupported
from steplab.ops.attention.autocast import as_autocast_would

_WHAT = "attention 'flash_attn_4'"


def flash_attn_4_attention(
    q_BHSD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(scale * q k^T) v by flash_attn.cute.flash_attn_func, which has the heads after the positions.

    Raises Unsupported without the package, or for inputs that it does not take.
    """
    q_BHSD, k_BHKD, v_BHKD = as_autocast_would(q_BHSD, k_BHKD, v_BHKD)
    attend = _flash_attn_func()
    if q_BHSD.device.type != "cuda":
        raise Unsupported(f"{_WHAT} on {q_BHSD.device.type}", "its kernels are for CUDA", "choose sdpa")
    if q_BHSD.dtype not in (torch.bfloat16, torch.float16):
        shown = str(q_BHSD.dtype).removeprefix("torch.")
        raise Unsupported(f"{_WHAT} in {shown}", "its kernels are for bfloat16 and float16", "choose sdpa")
    if causal and q_BHSD.shape[-2] != k_BHKD.shape[-2]:
        why = "its causal mask counts positions from the last query and key, torch's from the first"
        raise Unsupported(f"{_WHAT}, causal, with more keys than queries or fewer", why, "choose sdpa")
    heads_last = (x.transpose(1, 2) for x in (q_BHSD, k_BHKD, v_BHKD))
    result = attend(*heads_last, softmax_scale=scale, causal=causal)
    # Some versions give the log-sum-exp too.
    o_BSHD: Tensor = result[0] if isinstance(result, tuple) else result
    return o_BSHD.transpose(1, 2)


def _flash_attn_func() -> Any:
    try:
        flash_attn_func = import_module("flash_attn.cute").flash_attn_func
    except ImportError as error:
        raise Unsupported(_WHAT, f"flash-attn-4 is not to be imported ({error})", "pip install flash-attn-4") from None
    return flash_attn_func
