import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed import planted as program
from tests.distributed.planted import Planted

from steplab.explain.api import explain
from steplab.lab.profiling import import_trace

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs"),
]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_delayed_by_5_ms_is_found(tmp_path: Path, late: int) -> None:
    words = [str(NUM_GPUS), str(late), "0.005", str(tmp_path)]
    ranks = [subprocess.Popen([sys.executable, program.__file__, str(rank), *words]) for rank in range(NUM_GPUS)]
    assert [rank.wait(120) for rank in ranks] == [0] * NUM_GPUS
    run = import_trace(tmp_path, store=tmp_path / "store.db")
    measured_s = Planted(world=NUM_GPUS, rank=late, delay_s=0.005).measured_s(tmp_path)
    found = {finding.kind: finding for finding in explain(run)}["straggler"]
    assert found.title.startswith(f"Rank {late} comes last")
    assert measured_s >= 4.5e-3  # behind the other ranks, which themselves differ by about 0.1 ms
    assert found.saves_s == pytest.approx(measured_s, rel=0.1)
