"""`auto`: which implementation for the tensors in hand, by the rule (choice_rule)."""

from functools import cache

import torch
from torch import Tensor

from .autocast import autocast_dtype
from .choice_rule import Choice, choose
from .shapes import fixed, num_key_heads
from .triton_tuning import hopper_kernels_on


def choice_for(q: Tensor, k: Tensor, *, causal: bool) -> Choice:
    """The choice for tensors in hand."""
    return _choice(*_described(q, k), causal)


def name_for(q: Tensor, k: Tensor, *, causal: bool) -> str:
    """The implementation of that choice; within torch.compile, a constant of the graph."""
    return _name(*_described(q, k), causal)


_Described = tuple[torch.device, torch.dtype, int, int, int, bool]


def _described(q: Tensor, k: Tensor) -> _Described:
    """The device, dtype and sizes that a choice depends on, besides the mask."""
    dtype = autocast_dtype(q.device.type) or q.dtype
    grouped = q.dim() > 3 and num_key_heads(k) != q.shape[-3]
    return q.device, dtype, fixed(q.shape[-1]), fixed(q.shape[-2]), fixed(k.shape[-2]), grouped


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    num_queries: int,
    num_keys: int,
    grouped: bool,
    causal: bool,
) -> str:
    return _choice(device, dtype, head_dim, num_queries, num_keys, grouped, causal).implementation


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
    """What the rule knows a device by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
