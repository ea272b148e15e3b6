import time
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import on_ranks
from tests.sure import sure

from steplab.lab.recording import recorder
from steplab.records.run import Run
from steplab.records.validation import check
from steplab.store.database import Store

SLOWER_S = 0.02


def loop(folder: str, failing: bool) -> None:
    rank = dist.get_rank()
    with recorder(
        "loop", device="cpu", tokens_per_step=64, warmup=1, profile=range(2, 3), store=Path(folder) / f"{rank}.db"
    ) as rec:
        for number in range(7 - rank):
            with rec.step():
                time.sleep(SLOWER_S * rank)
                if number == 0:
                    with rec.phase("evaluate"):
                        torch.ones(2) + 1
                with rec.phase("forward"):
                    torch.ones(2) + 1
            if number == 5:  # not a phase of each step
                with rec.step(), rec.phase("evaluate"):
                    torch.ones(2) + 1
        if failing:
            raise ValueError("diverged")
    assert (rec.run is not None) == (rank == 0)


def loop_that_fails(folder: str) -> None:
    with pytest.raises(ValueError, match="diverged"):
        loop(folder, failing=True)


def runs_in(folder: Path) -> list[Run]:
    assert [path.name for path in folder.glob("*.db")] == ["0.db"]
    with Store.open(folder / "0.db", write=False) as store:
        return [run for run in store.iterate(kind="run") if isinstance(run, Run)]


def test_the_first_rank_stores_one_record_with_the_samples_of_all(tmp_path: Path) -> None:
    on_ranks(2, loop, str(tmp_path), False)
    [run] = runs_in(tmp_path)
    check(run)
    assert run.failure is None
    first = sure(sure(run.timing).phase("step"))
    assert len(first.best_s) == 8 - 1 - 2  # of eight steps, without the warm-up and the two under the profiler
    assert run.profile is not None
    assert [rank.rank for rank in run.ranks] == [0, 1]
    steps = [rank.phase("step") for rank in run.ranks]
    columns = [step.best_s for step in steps if step]
    assert [len(column) for column in columns] == [4, 4]
    assert median(columns[0]) < SLOWER_S <= median(columns[1])
    assert "ranks: compared over 4 steps, because that is how many one rank ran" in run.notes


def test_a_loop_that_fails_does_not_wait_for_the_other_ranks(tmp_path: Path) -> None:
    on_ranks(2, loop_that_fails, str(tmp_path))
    [run] = runs_in(tmp_path)
    assert run.failure is not None
    assert run.ranks == ()
    assert any(note.startswith("ranks: this is the first rank alone") for note in run.notes)
