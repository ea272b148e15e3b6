import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 4])
def test_layouts_train_as_one_process(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} CUDA GPUs")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    finished = subprocess.run(
        [*command, "-m", "tests.gpu.layout_ranks"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "NCCL_NVLS_ENABLE": "0"},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
