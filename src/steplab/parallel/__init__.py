"""Many processes, one model: gradients averaged over ranks. Knows nothing of steplab but its errors."""

from steplab.parallel.data_parallel import DataParallel

__all__ = ["DataParallel"]
