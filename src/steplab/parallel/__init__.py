"""Training on many GPUs: gradients averaged over ranks, optimizer state spread over them.

It imports nothing of steplab but its errors.
"""

from steplab.parallel.data_parallel import DataParallel
from steplab.parallel.sharded_optimizer import ShardedOptimizer
from steplab.parallel.sharded_state import merge_shards

__all__ = ["DataParallel", "ShardedOptimizer", "merge_shards"]
