"""Training on many GPUs. Each file can be read by itself; nothing here needs the rest of steplab but its errors."""

from steplab.parallel.sharded_optimizer import ShardedOptimizer
from steplab.parallel.sharded_state import merge_shards

__all__ = ["ShardedOptimizer", "merge_shards"]
