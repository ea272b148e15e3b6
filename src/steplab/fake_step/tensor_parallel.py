"""Splits a model by transformers' tensor-parallel plan: each parameter in the shape that one rank has.

All-reduces are in place and need no memory, so only their number is noted. transformers all-reduces whole tokens,
without sequence parallelism. A weight that embedding and head share stays whole.
"""

import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from steplab.errors import Unsupported, UserError

_BY_ROWS = ("colwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise", "packed_colwise")
"""Styles that split a matrix by its outputs, the first dimension."""
SLICED = ("rowwise_split_input", "rowwise_rep")
"""Styles of modules whose input is whole on every rank: each takes its slice, and backward gathers the gradient."""
_BY_COLUMNS = ("rowwise", "packed_rowwise", *SLICED)
GATHERED = ("colwise_gather_output", "colwise_rep")
"""Styles of modules whose whole output is gathered on every rank."""
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "moe_tp_experts", "local_params")
SUMS = {"rowwise": (1, 0), "embedding_rowwise": (1, 0), "moe_tp_experts": (1, 1)}
"""Style of a module -> number of all-reduces of its tokens in the forward and in the backward pass."""
SUMS |= dict.fromkeys(("colwise", *GATHERED), (0, 1)) | dict.fromkeys(SLICED, (1, 0))


def split_for_tp(module: nn.Module, tp: int, label: str) -> None:
    """Replace the parameters by the first rank's shards, and note each module's style in `tp_style`.

    Raises Unsupported for a model without a plan, UserError for a size that `tp` does not divide.
    """
    what = f"layout tp={tp} for {label}"
    model: Any = next((m for m in module.modules() if hasattr(m, "base_model_prefix")), None)
    if not getattr(getattr(model, "config", None), "base_model_tp_plan", None):
        kind = getattr(getattr(model, "config", None), "model_type", "this model")
        raise Unsupported(what, f"transformers has no tensor-parallel plan for {kind}", "use fsdp or dp")
    plan = model._tp_plan  # with the head, and in new versions the embedding
    text = model.config.get_text_config()
    for size in ("num_attention_heads", "num_key_value_heads"):
        _divided(getattr(text, size, None) or tp, tp, size)
    gathered: Any = _Gathered.apply
    sliced: Any = _Sliced.apply
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, inner in model.named_modules():
        style = plan.get(_general(name))
        own = dict(inner.named_parameters(recurse=False))
        if style is None and not any(_general(f"{name}.{each}") in plan for each in own):
            continue
        if any(uses[id(parameter)] > 1 for parameter in own.values()):
            continue
        for key, parameter in own.items():
            its = plan.get(_general(f"{name}.{key}"), style)
            if its not in (*_BY_ROWS, *_BY_COLUMNS, *_WHOLE):
                raise Unsupported(what, f"the style {its} of its plan is not known", "use fsdp or dp")
            inner.register_parameter(key, _part(parameter, its, tp, f"{name}.{key}"))
        inner.tp_style = style
        if style in GATHERED:
            inner.register_forward_hook(lambda _, __, made: gathered(made, tp))
        elif style in SLICED:
            inner.register_forward_pre_hook(lambda _, given: (sliced(given[0], tp), *given[1:]))


def _general(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _divided(size: int, tp: int, what: str) -> int:
    if size % tp:
        raise UserError(f"tp={tp} does not divide {what} {size}")
    return size // tp


def _part(parameter: nn.Parameter, style: str | None, tp: int, name: str) -> nn.Parameter:
    sizes = list(parameter.shape)
    dim = max(len(sizes) - 2, 0) if style in _BY_ROWS else len(sizes) - 1
    if style in _WHOLE or (style in _BY_COLUMNS and len(sizes) == 1):  # a bias is added after the sum
        return parameter
    sizes[dim] = _divided(sizes[dim], tp, f"{name}'s size of")
    return nn.Parameter(parameter.new_empty(sizes), requires_grad=parameter.requires_grad)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, tp: int) -> Tensor:
        ctx.width = local.shape[-1]
        return local.new_empty((*local.shape[:-1], tp * local.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[..., : ctx.width].contiguous(), None


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, tp: int) -> Tensor:
        ctx.shape = whole.shape
        return whole[..., : whole.shape[-1] // tp].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_empty(ctx.shape), None
