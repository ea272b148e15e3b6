"""Inputs as autocast would hand them to an operator that it runs in low precision."""

import torch
from torch import Tensor


def as_autocast_would(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in autocast's type where it is on, as scaled_dot_product_attention gets them; float64 stays."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    return q, k, v
