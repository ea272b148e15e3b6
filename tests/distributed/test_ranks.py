import os
import time

import pytest
import torch.distributed as dist
from tests.distributed import ranks
from tests.distributed.ranks import on_ranks


def fine(expected: int) -> None:
    assert dist.get_world_size() == expected


def fails_on_rank_1_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("as it should")
    dist.barrier()


def sleeps_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def dies_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_failures_and_hangs_are_told_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(2, fine, 2)
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    with pytest.raises(AssertionError, match=r"rank 1: Traceback(.|\n)*as it should\n(.|\n)*rank 0: still in fails_on"):
        on_ranks(2, fails_on_rank_1_while_the_other_waits)
    on_ranks(2, fine, 2)
    with pytest.raises(AssertionError, match="rank 1: the process ended"):
        on_ranks(2, dies_on_rank_1)
    on_ranks(2, fine, 2)
    monkeypatch.setattr(ranks, "TIMEOUT_S", 0.5)
    with pytest.raises(AssertionError, match=r"rank 0, 1: still in sleeps_on_rank_0 after 0.5 s"):
        on_ranks(2, sleeps_on_rank_0)
    monkeypatch.setattr(ranks, "TIMEOUT_S", 60)
    on_ranks(2, fine, 2)
