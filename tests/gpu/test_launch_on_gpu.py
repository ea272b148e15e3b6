import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.cli.program import Program
from tests.distributed import faulty

from steplab.records.codec import decode
from steplab.records.run import Run

NUM_GPUS = torch.cuda.device_count()
PROMPTLY_S = 90.0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs")]


@pytest.fixture
def steplab(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    program.write("faulty.py", Path(faulty.__file__).read_text(encoding="utf-8"))
    yield program
    program.end_all()


def on_gpus(program: Program, *options: str) -> tuple[int, str, Run | None]:
    """Exit code, last line, and record; from a shell, since a forked process cannot use CUDA."""
    result = program("run", *options, prefix=("env",), timeout_s=PROMPTLY_S)
    rows = program.rows()
    record = decode(program("show", rows[0]["id"], "--format", "json").stdout) if rows else None
    assert record is None or isinstance(record, Run)
    return result.code, (result.stderr.splitlines() or [""])[-1], record


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap", "bucketed"])
def test_each_rank_has_a_gpu_and_the_same_steps(steplab: Program, strategy: str) -> None:
    options = ("--model", "small", "--context", "256", "--precision", "bf16", "--gpus", "2", "--steps", "5")
    code, said, run = on_gpus(steplab, *options, "--data-parallel", strategy)
    assert code == 0, said
    assert run is not None
    assert run.memory is not None
    first, second = run.ranks
    assert first.device_name == second.device_name
    assert first.peaks == run.memory.peaks
    ours, theirs = first.peak("step"), second.peak("step")
    assert ours is not None
    assert theirs is not None
    assert theirs.peak_allocated_bytes == pytest.approx(ours.peak_allocated_bytes, rel=0.05)
    assert run.tokens_per_step == 2 * 4 * 256
    assert {used.num_devices for used in run.utilizations} == {2}
    assert all(used.value is not None and 0 < used.value < 1 for used in run.utilizations)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("out_of_memory", "out of memory: rank 1 on {host}: asked for 64.0 TiB more"),
        ("killed", "crashed: rank 1 on {host}: the process was ended by SIGKILL during warmup"),
        ("hangs", "timeout: rank 1 on {host}: did not end within 40.0 s: it is at work/faulty.py:"),
    ],
)
def test_a_rank_that_fails_ends_the_run_though_the_other_waits_in_nccl(steplab: Program, fault: str, told: str) -> None:
    started_s = time.monotonic()
    code, said, run = on_gpus(steplab, "--model", f"faulty:{fault}", "--gpus", "2", "--timeout", "40s")
    assert time.monotonic() - started_s < PROMPTLY_S
    assert code == 1
    assert said.startswith(f"steplab: {told.format(host=socket.gethostname())}")
    assert run is not None
    assert run.failure is not None
    assert run.failure.rank == 1


def test_more_gpus_than_there_are_are_refused_before_any_rank_starts(steplab: Program) -> None:
    code, said, run = on_gpus(steplab, "--gpus", str(NUM_GPUS + 1))
    assert code == 2
    assert f"use at most {NUM_GPUS}" in said
    assert run is None
