"""Inputs as autocast would hand them to an operator that it runs in low precision."""

import torch
from torch import Tensor


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that autocast is on with; None where it is off. Tensors without content, on meta, have no autocast."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def as_autocast_would(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in autocast's type where it is on, as scaled_dot_product_attention gets them; float64 stays."""
    dtype = autocast_dtype(q.device.type)
    if dtype is None:
        return q, k, v
    q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    return q, k, v
