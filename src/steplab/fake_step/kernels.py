"""Facts about single operators: sizes of matmuls, fused attention, temporary memory within kernels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steplab.costs.kernel_time import FIRST_FACTOR, Product
from steplab.costs.operators import BACKWARD_FLOPS
from steplab.errors import Unsupported
from steplab.ops.attention.implementations import implementation
from steplab.plan.dry_run.sizes import Count

_GROUPED, _HALF_TILE = "_grouped_mm", 64
_FUSED = {
    f"_scaled_dot_product_{theirs}_attention{suffix}": (ours, bool(suffix))
    for theirs, ours in (("flash", "sdpa_flash"), ("efficient", "sdpa_efficient"), ("cudnn", "sdpa_cudnn"))
    for suffix in ("", "_backward")
}


def product_of(name: str, args: tuple[Any, ...]) -> Product | None:
    """Sizes of a matmul; None for other operators.

    The groups of a grouped matmul (experts) are assumed to have equal numbers of rows. Half a tile, 64 rows, is added
    to each, because its last tile is half empty on average.
    """
    if name == _GROUPED:
        rows, second, groups = args[0], args[1], args[2].shape[0]
        if second.dim() == 3:
            return Product(m=rows.shape[0] // groups + _HALF_TILE, n=second.shape[-1], k=rows.shape[-1], batch=groups)
        return Product(m=rows.shape[0], n=second.shape[-1], k=rows.shape[-1] // groups + _HALF_TILE, batch=groups)
    if name in ("convolution", "convolution_backward"):
        return _convolution(args[1:], args[0], sum(args[10][:2])) if len(args) > 9 else _convolution(args, None, 1)
    if name in FIRST_FACTOR:
        first, second = args[FIRST_FACTOR[name] :][:2]
        batch = first.shape[0] if first.dim() == 3 else 1
        sizes = {"m": first.shape[-2], "n": second.shape[-1], "k": first.shape[-1]}
        return Product(**sizes, batch=batch, transposed=first.stride(-1) != 1 and first.stride(-2) == 1)
    return None


def _convolution(args: tuple[Any, ...], gradient: Tensor | None, times: int) -> Product:
    """A convolution as the matmul of its patches by its filters.

    gradient: the output's, in backward; None in forward. times: number of such matmuls, in backward one for each
    requested gradient of input and filters.
    """
    given, weight, _, stride, padding, dilation, transposed, _, groups = args[:9]
    sizes, kernel = given.shape[2:], weight.shape[2:]
    if transposed:  # each input element is multiplied by a filter
        rows, width = math.prod(sizes), weight.shape[0] // groups
        return Product(m=given.shape[0] * rows, n=weight[0].numel(), k=width, batch=groups * max(times, 1))
    if gradient is not None:
        made = list(gradient.shape[2:])
    else:
        along = zip(sizes, kernel, stride, padding, dilation, strict=True)
        made = [(size + 2 * pad - gap * (width - 1) - 1) // step + 1 for size, width, step, pad, gap in along]
    outputs = weight.shape[0] // groups
    return Product(m=given.shape[0] * math.prod(made), n=outputs, k=weight[0].numel(), batch=groups * max(times, 1))


def flops_of_product(name: str, args: tuple[Any, ...], product: Product) -> float:
    """FLOPs of a matmul; for a grouped one, of its actual rows, without the half tiles of `product_of`."""
    if name != _GROUPED:
        return float(product.flops)
    return 2.0 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]


def refuse_unknown(name: str, namespace: str, doing: str) -> None:
    """Raise Unsupported, with the action `doing`, for custom operators and others whose cost is unknown."""
    if namespace != "aten":
        raise Unsupported(doing, f"the cost of its operator {namespace}::{name} is not known", _INSTEAD)
    if name.startswith(_UNKNOWN):
        raise Unsupported(doing, f"the cost of operators like its {name} is not known", _INSTEAD)


def refuse_sparse(name: str, outputs: Sequence[Tensor], doing: str) -> None:
    """Raise Unsupported for sparse results, whose size is unknown before the operator runs."""
    if any(each.layout != torch.strided for each in outputs):
        raise Unsupported(doing, f"its {name} makes sparse tensors; their sizes depend on values", _INSTEAD)


_UNKNOWN = (
    *("_scaled_mm", "_scaled_grouped_mm", "_cudnn_rnn", "_thnn_", "_flash_", "_fft"),
    "mkldnn_rnn",  # torch's substitute for cuDNN's on a CPU
)
_INSTEAD = "measure it with `steplab run`"


@dataclass(frozen=True, slots=True)
class Fused:
    name: str
    scores: Product
    flops: float
    """FLOPs of all matmuls in the kernel; a causal mask halves them."""


def fused_attention(name: str, args: tuple[Any, ...]) -> Fused | None:
    if name not in _FUSED:
        return None
    ours, backward = _FUSED[name]
    query, key = args[1:3] if backward else args[:2]
    batch, heads, tokens, width = query.shape
    scores = Product(m=tokens, n=key.shape[-2], k=width, batch=batch * heads)
    declared = getattr(torch.ops.aten, name).default._schema.arguments
    causal = any(bool(each) for argument, each in zip(declared, args, strict=False) if argument.name == "is_causal")
    flops = scores.flops * (1.0 if causal else 2.0)  # two products, halved by the mask
    return Fused(f"{ours}_backward", scores, flops * BACKWARD_FLOPS) if backward else Fused(ours, scores, flops)


def held_within(name: str, args: tuple[Any, ...]) -> list[Count]:
    """Bytes of each temporary tensor within a kernel."""
    if name == "_softmax_backward_data":  # gradient and output are multiplied first
        return [_bytes(args[0].element_size(), *args[0].shape)]
    if name not in _FUSED or not _FUSED[name][1]:
        return []
    row, query, key = implementation(_FUSED[name][0]), args[1], args[2]
    batch, heads, tokens, width = query.shape
    found = []
    shared = key.shape[1] != heads
    for each in row.workspaces:
        if each.taken(query.element_size(), width, shared=shared):
            its_heads, its_tokens = (key.shape[1], key.shape[2]) if each.of_shared_keys else (heads, tokens)
            found.append(_bytes(4 * each.times, *each.shape(batch, its_heads, its_tokens, width)))
    if row.expands_groups and shared:
        found += 2 * [_bytes(query.element_size(), *query.shape)]
    return found


def _bytes(*sizes: int) -> Count:
    return Count(math.prod(sizes), " x ".join(map(str, sizes)))
