from pathlib import Path
from statistics import median

import pytest
import torch
from tests.cli.program import Program

from steplab.records.comm import CommRun
from steplab.specs.comm import COLLECTIVES
from steplab.store.database import Store

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs")


@pytest.fixture
def steplab(tmp_path: Path) -> Program:
    return Program(tmp_path)


def measured(steplab: Program, *arguments: str) -> CommRun:
    # Started as from a shell: a forked process cannot use CUDA.
    result = steplab("comm", "--gpus", str(NUM_GPUS), *arguments, "--repeats", "10", prefix=("env",))
    assert result.code == 0, result.stderr
    with Store.open(steplab.store, write=False) as store:
        record = store.get(str(store.rows(kind="comm")[0]["id"]))
    assert isinstance(record, CommRun)
    return record


def test_nccl_is_right_and_timed_by_events_on_every_rank(steplab: Program) -> None:
    run = measured(steplab, "--size", "100kB,10MB", "--dtype", "fp32,bf16")
    worlds = {cell.spec.world_size for cell in run.cells}
    assert {2, NUM_GPUS} <= worlds
    assert len(run.cells) == 2 * 2 * len(COLLECTIVES) * len(worlds)
    assert run.libraries["nccl"].startswith("2.")
    assert [rank.device.split()[0] for rank in run.ranks] == [f"cuda:{rank}" for rank in range(NUM_GPUS)]
    for cell in run.cells:
        assert cell.failure is None, cell
        assert len(cell.ranks) == cell.spec.world_size
        for times in cell.ranks:
            assert times.device_s is not None
            assert len(times.device_s) == len(times.alone_s) == 10
            # A call alone, by the host's clock, has Python's time and the drain in it.
            assert median(times.device_s) < median(times.alone_s)
            assert times.num_waits is not None
    # On a machine that does other work as well, a sample may have waited for Python: then a note says so.
    waited = [cell.spec.label for cell in run.cells if any(times.num_waits for times in cell.ranks)]
    assert [note.partition(":")[0] for note in run.notes if "waited for Python" in note] == waited


def test_backends_stand_beside_each_other(steplab: Program) -> None:
    run = measured(steplab, "--collective", "all_reduce", "--size", "1MB,10MB", "--backend", "nccl,peer_copy,gloo")
    assert {cell.spec.transport for cell in run.cells if cell.failure is None} == {"nccl", "peer_copy", "gloo"}
