"""Compiles a whole model, or each of its repeated blocks alone."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from steplab.errors import Unsupported
from steplab.ops.columns import lower_join


@cache
def what_inductor_lacks() -> dict[str, str]:
    """The changes to Inductor that the installed torch does not support, each with the reason."""
    lacks = {}
    try:
        lower_join()
    except (ImportError, AttributeError) as error:
        lacks["columns side by side"] = str(error)
    try:
        from steplab.model import gradient_products as _  # noqa: F401
    except (ImportError, AttributeError) as error:
        lacks[FP32_GRADIENTS] = str(error)
    if "dtype" not in torch.ops.aten.mm.overloads():
        lacks[FP32_GRADIENTS] = "no product of bf16 with an fp32 result"
    return lacks


FP32_GRADIENTS = "fp32 gradients of products"


def notes_on_compiling() -> tuple[str, ...]:
    """A sentence for each optimization that a compiled step lacks with the installed torch."""
    return tuple(
        f"torch {torch.__version__} compiles without {what}, which costs time: {why}"
        for what, why in what_inductor_lacks().items()
    )


def compiled(function: Callable[..., Any], mode: str) -> Any:
    what_inductor_lacks()  # lowers steplab's operators
    return torch.compile(function, mode=None if mode in ("default", "block") else mode)


def compiled_forward(block: nn.Module, forward: Callable[..., Any], mode: str) -> Any:
    wanted = mode == "block" and getattr(block, "fp32_gradients_of_products", False)
    if not wanted or FP32_GRADIENTS in what_inductor_lacks():
        return compiled(forward, mode)
    from steplab.model.gradient_products import gradients_of_products

    return torch.compile(forward, options={"post_grad_custom_post_pass": gradients_of_products()})


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The modules of the model's largest nn.ModuleList, each once even if listed twice. Raises Unsupported if it has no
    such list.
    """
    lists = [inner for inner in module.modules() if isinstance(inner, nn.ModuleList) and len(inner)]
    if not lists:
        raise Unsupported(
            "working block by block",
            "the model has no nn.ModuleList of blocks",
            "use another model, or leave out --compile block, --update overlapped and --layout fsdp",
        )
    largest = max(lists, key=lambda blocks: sum(parameter.numel() for parameter in blocks.parameters()))
    return list(dict.fromkeys(largest))
