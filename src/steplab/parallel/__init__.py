"""Data parallelism and a sharded optimizer, to copy into other projects. The folder needs only torch, and
peer_copies.py Triton for its kernel; sizes.py needs neither.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data_parallel import DataParallel
    from .sharded_optimizer import ShardedOptimizer, merge_shards

__all__ = ["DataParallel", "ShardedOptimizer", "merge_shards"]

_HOMES = {"DataParallel": "data_parallel", "ShardedOptimizer": "sharded_optimizer", "merge_shards": "sharded_optimizer"}


def __getattr__(name: str) -> Any:
    """Import public names at first use, so that sizes.py works without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
