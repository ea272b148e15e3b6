"""steplab.parallel over NCCL and over copies between GPUs, on two GPUs and on all there are."""

import random

import pytest
import torch
from tests.gpu.data_parallel_cases import in_a_group
from torch.multiprocessing.spawn import start_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA GPUs"),
]

CASES = [
    "trains_as_one_process_does",
    "gradients_are_those_of_torch_ddp",
    "the_current_device_may_be_another",
    "many_steps_of_many_buckets_race_for_nothing",
    "a_sharded_optimizer_does_what_the_whole_one_does",
]


@pytest.mark.parametrize("size", sorted({2, torch.cuda.device_count()}))
@pytest.mark.parametrize("what", CASES)
def test_data_parallelism(what: str, size: int) -> None:
    port = random.randint(20_000, 60_000)
    start_processes(in_a_group, (size, port, what), nprocs=size, start_method="spawn")
