import random

import pytest
import torch
from tests.gpu.data_parallel_cases import in_a_group
from torch.multiprocessing.spawn import start_processes

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA GPUs")


@pytest.mark.parametrize("size", sorted({2, torch.cuda.device_count()}))
def test_data_parallelism(size: int) -> None:
    """One group of processes, since starting it takes longer than most cases."""
    port = random.randint(20_000, 60_000)
    start_processes(in_a_group, (size, port), nprocs=size, start_method="spawn")
