"""The last linear layer and the cross-entropy loss in one function, several ways."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steplab.ops.cross_entropy.api import linear_cross_entropy

__all__ = ["linear_cross_entropy"]


def __getattr__(name: str) -> Any:
    """The function, imported when first asked for: the table of implementations is read without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.api"), name)
