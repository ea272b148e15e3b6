"""Scaled dot-product attention by several implementations behind one function."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import IMPLEMENTATIONS, attention
    from .choice_rule import Choice, choose
    from .functions import FlashAttentionReference, FlashAttentionTriton

__all__ = ["IMPLEMENTATIONS", "Choice", "FlashAttentionReference", "FlashAttentionTriton", "attention", "choose"]

_HOMES = {
    "IMPLEMENTATIONS": "api",
    "attention": "api",
    "Choice": "choice_rule",
    "choose": "choice_rule",
    "FlashAttentionReference": "functions",
    "FlashAttentionTriton": "functions",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that a part of this folder can be used without importing the rest."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
