"""The harness itself: what goes wrong on a rank is told by the name of the case, and nothing waits for ever."""

import os
import time

import torch
import torch.distributed as dist
from tests.distributed.world import Cases, run_world

cases = Cases(__name__)


@cases
def all_is_well() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


@cases
def one_fails() -> None:
    assert dist.get_rank() == 0, "a rank that is not the first"


@cases
def one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


@cases
def one_hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def test_a_failing_case_leaves_the_next_a_clean_start() -> None:
    problems = run_world(__name__, ["one_fails", "all_is_well"], 2, case_timeout_s=3)
    assert problems["all_is_well"] == []
    assert "AssertionError: a rank that is not the first" in problems["one_fails"][-1]
    assert problems["one_fails"][-1].startswith("on rank 1 of 2")


def test_a_rank_that_dies_is_named() -> None:
    problems = run_world(__name__, ["all_is_well", "one_dies"], 2, case_timeout_s=3)
    assert problems["all_is_well"] == []
    assert "on rank 1 of 2: the process has died" in problems["one_dies"][-1]


def test_a_rank_that_hangs_is_named() -> None:
    problems = run_world(__name__, ["all_is_well", "one_hangs"], 2, timeout_s=15, case_timeout_s=3)
    assert problems["all_is_well"] == []
    assert "on rank 1 of 2: nothing was heard of this case in time" in problems["one_hangs"][-1]
