"""Training on many GPUs: gradients averaged over ranks, and optimizer state sharded over them.

The folder imports only torch, and Triton for one kernel, so that it can be copied into another project. sizes.py needs
no torch, so that plans can read it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data_parallel import DataParallel
    from .sharded_optimizer import ShardedOptimizer, merge_shards

__all__ = ["DataParallel", "ShardedOptimizer", "merge_shards"]

_HOMES = {"DataParallel": "data_parallel", "ShardedOptimizer": "sharded_optimizer", "merge_shards": "sharded_optimizer"}


def __getattr__(name: str) -> Any:
    """Import public names at their first use: parts of this folder are used without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
