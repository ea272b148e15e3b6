"""Makes torch treat fake CPU tensors as on CUDA, because a build without CUDA cannot fake CUDA tensors.

It substitutes CUDA's autocast rules, and fused kernels for functions that a CPU composes.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_PREFIX = "aten::"
_LOWER = frozenset(
    {
        *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"),
        *("addmv", "addr", "chain_matmul", "einsum", "linalg_multi_dot", "mv", "_scaled_dot_product_flash_attention"),
    }
)
"""Operators that autocast runs in low precision on CUDA, but not on a CPU."""
_PROMOTED = frozenset(
    ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot"]
)
"""Operators whose inputs autocast widens to the widest format. They are left as on a CPU, because torch promotes most
of them without autocast too.
"""
_CELLS = ("cell", "_thnn_")


@contextmanager
def as_on_cuda() -> Iterator[None]:
    with ExitStack() as at_end, torch.library._scoped_library("aten", "IMPL") as library:
        _forget_kernels()
        at_end.callback(_forget_kernels)
        for name in _rules_of("AutocastCUDA") - _rules_of("AutocastCPU"):
            stem = name.partition(".")[0]
            if stem in _PROMOTED or any(part in stem for part in _CELLS):
                continue
            cast = _to_low if stem in _LOWER else _to_fp32
            library.impl(name, partial(_cast_first, _overload(name), cast), "AutocastCPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # replacing the CPU's rules is intended
            library.impl("cross_entropy_loss", torch.library.fallthrough_kernel, "AutocastCPU")
            if hasattr(_aten, "_grouped_mm"):
                library.impl("_grouped_mm", _grouped_mm, "Meta")
        for name, kernel in _OWN.items():
            library.impl(name, kernel, "AutogradCPU")
        yield


def _forget_kernels() -> None:
    """Clear torch's cache of each operator's kernel, which is valid either as on CUDA or as on a CPU."""
    for packet in vars(_aten).values():
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for name in packet.overloads():
                getattr(packet, name)._dispatch_cache.clear()


def _rules_of(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)}


def _overload(name: str) -> Any:
    stem, _, overload = name.partition(".")
    return getattr(getattr(_aten, stem), overload or "default")


def _cast_first(op: Any, cast: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
    """Run the operator without autocast on cast inputs; if the caller passes a dtype, on the inputs as they are."""
    with torch._C._ExcludeDispatchKeyGuard(_CPU_KEY):
        if any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
            return op(*args, **kwargs)
        return op(*tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs))


def _to_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _to_low(x: Tensor) -> Tensor:
    return x.to(torch.get_autocast_dtype("cpu")) if x.dtype is torch.float32 else x


def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """RMSNorm as one kernel, if weight and input are in one format; else torch's composition."""
    if weight is not None and weight.dtype is not x.dtype:
        exponent = torch.finfo(x.dtype).eps if eps is None else eps
        wide = x.float()
        reciprocal = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + exponent)
        return (wide * reciprocal).to(x.dtype) * weight
    fused: Any = _FusedRmsNorm.apply
    return fused(x, normalized_shape, weight, eps)


_below_autograd: Any = torch._C._AutoDispatchBelowAutograd


class _FusedRmsNorm(torch.autograd.Function):
    """RMSNorm as one operator with its own backward pass, as on CUDA; a CPU composes it of others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        # Gradients are on, as for torch's operators, which distinguishes a recomputation from a backward pass.
        with torch.set_grad_enabled(ctx.needs_input_grad[0] or ctx.needs_input_grad[2]), _below_autograd():
            output, reciprocal = _aten._fused_rms_norm(x, normalized_shape, weight, eps)
        ctx.save_for_backward(x, reciprocal, weight)
        ctx.normalized_shape = normalized_shape
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, reciprocal, weight = ctx.saved_tensors
        wanted = [True, weight is not None]
        of_x, of_weight = _aten._fused_rms_norm_backward(gradient, x, ctx.normalized_shape, reciprocal, weight, wanted)
        return of_x, None, of_weight, None


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: object, **__: object) -> Tensor:
    """Fake grouped matmul in every number format; torch's own accepts bf16 only."""
    assert offs is not None
    sizes = (offs.shape[0], a.shape[0], b.shape[1]) if b.dim() == a.dim() == 2 else (a.shape[0], b.shape[-1])
    return a.new_empty(sizes)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout in one kernel, which saves a mask of one byte an element."""
    if not train or p == 0:
        return x
    return _aten.native_dropout(x, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the first enabled kernel that takes the inputs, in torch's order
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
    width, on = query.shape[-1], torch.backends.cuda
    grouped, half = query.shape[-3] != key.shape[-3], query.dtype in (torch.bfloat16, torch.float16)
    given = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": width**-0.5 if scale is None else scale}
    equal = key.shape[-1] == value.shape[-1]
    if on.flash_sdp_enabled() and half and equal and attn_mask is None and width <= _WIDEST_OF_FLASH:
        wider = (-width) % _ELEMENTS_OF_FLASH
        padded = [torch.nn.functional.pad(x, (0, wider)) if wider else x for x in (query, key, value)]
        output = _aten._scaled_dot_product_flash_attention(*padded, **given)[0]
        return output[..., :width] if wider else output
    bias = _numbers(attn_mask, query.dtype)
    kept = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if on.mem_efficient_sdp_enabled() and not grouped:
        if bias is not None:
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
        return _aten._scaled_dot_product_efficient_attention(query, key, value, bias, kept, **given)[0]
    if on.cudnn_sdp_enabled() and half:
        return _aten._scaled_dot_product_cudnn_attention(query, key, value, bias, kept, **given)[0]
    return _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, enable_gqa=enable_gqa, **given)[0]


_WIDEST_OF_FLASH, _ELEMENTS_OF_FLASH = 256, 8
"""FlashAttention's largest head dimension, and the multiple that it is padded to."""


def _numbers(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


_OWN: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
    "dropout": _dropout,
}
