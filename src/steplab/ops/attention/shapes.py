"""Checks of attention's tensors, and their conversion to autocast's type and to four dimensions. Shape suffixes: B
batch, H query heads, N key heads, S query positions, K key positions, D head dimension."""

import torch
from torch import Tensor

from ..errors import Unsupported, UserError
from .implementations import DTYPES as NAMES_OF_DTYPES
from .implementations import why_not


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on this kind of device; None if autocast is off, as for meta tensors."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def as_autocast_would(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast tensors to autocast's dtype if it is on, as for scaled_dot_product_attention; float64 stays."""
    dtype = autocast_dtype(q.device.type)
    if dtype is None:
        return q, k, v
    q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    return q, k, v


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UserError, with the fix, unless shapes, types and devices are as api.attention requires."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        kinds = ", ".join(type(given).__name__ for given in (q, k, v))
        raise UserError(f"attention takes tensors of torch, not {kinds}")
    # One comparison for the common case: every head has its own keys, and K equals S.
    is_common = q.shape == k.shape == v.shape and len(q.shape) >= 2 and q.shape[-1] > 0
    fault = None if is_common else _fault_of_shapes(q.shape, k.shape, v.shape)
    if fault is not None:
        raise UserError(fault.format(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"))
    if not q.device == k.device == v.device:
        raise UserError(f"attention takes tensors of one device, not {q.device}, {k.device} and {v.device}")
    if (not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES) and not (
        autocast_dtype(q.device.type) is not None and {q.dtype, k.dtype, v.dtype} <= set(DTYPES) - {torch.float64}
    ):
        names = ", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (q, k, v)))
        raise UserError(f"attention takes tensors of one type, float32, bfloat16, float16 or float64, not {names}")


def _fault_of_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> str | None:
    """The fault, with {} for the shapes; None if they agree."""
    if len(q) < 2 or len(q) != len(k):
        return (
            "attention takes q [..., heads, queries, dim] with k and v [..., heads, keys, dim], or all of them "
            "[batch, positions, dim], or [positions, dim], not {}"
        )
    if k != v:
        return "attention takes v of the shape of k, not {}"
    if q[-1] != k[-1] or q[-1] == 0:
        return "attention takes q and k of one head dimension, at least 1, not {}"
    if len(q) < 4 and q[:-2] != k[:-2]:
        return (
            "attention takes three dimensions as [batch, positions, dim], with one batch for all, not {}; "
            "for grouped-query heads give [batch, heads, positions, dim]"
        )
    if q[:-3] != k[:-3]:
        return "attention broadcasts nothing: the dimensions before the heads must be alike, not {}; use expand"
    if len(q) >= 4 and q[-3] != k[-3] and (k[-3] == 0 or q[-3] % k[-3]):
        return "the number of key heads must divide the number of query heads, not {}"
    return None


def refuse_unserved(name: str, q: Tensor, k: Tensor, *, causal: bool, device: str | None = None) -> None:
    """Raise Unsupported if the implementation `name` does not support these tensors, by its row in the table.

    `device`: the kind of device that runs it, if not the tensors' own.
    """
    kind = device or q.device.type
    if kind == "meta":  # meta computes shapes only
        return
    dtype = q.dtype if q.dtype == torch.float64 else autocast_dtype(q.device.type) or q.dtype
    shown = str(dtype).removeprefix("torch.")
    why = why_not(
        name,
        device=kind,
        dtype=NAMES_OF_DTYPES[shown],
        head_dim=q.shape[-1],
        num_queries=q.shape[-2],
        num_keys=k.shape[-2],
        causal=causal,
        grouped=q.dim() > 3 and num_key_heads(k) != q.shape[-3],
    )
    if why is not None:
        given = f"given were {shown} queries {list(q.shape)} and keys {list(k.shape)} on {q.device.type}"
        raise Unsupported(f"attention '{name}'", f"{why} ({given})", "choose sdpa, or another precision or shape")


def as_four_dims(x: Tensor) -> Tensor:
    """Reshape a valid tensor to [B, H, S, D]: a view for up to 4 dimensions, and for more if strides admit one."""
    dims = x.dim()
    if dims == 4:
        return x
    if dims == 3:
        return x.unsqueeze(1)
    return x[None, None] if dims == 2 else x.flatten(0, dims - 4)


def num_key_heads(k: Tensor) -> int:
    return k.shape[-3] if k.dim() > 3 else 1


def default_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def fixed(size: int) -> int:
    """The size as a constant to torch.compile, which otherwise makes it a symbol when shapes change."""
    return len(range(size))
