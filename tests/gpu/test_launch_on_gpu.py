import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.cli.program import Program, wait_until
from tests.distributed import faulty

from steplab.records.codec import decode
from steplab.records.run import Run

NUM_GPUS = torch.cuda.device_count()
PROMPTLY_S = 90.0

pytestmark = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs")


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
        ("out_of_memory", "out of memory: rank 1 on {host}: 64.0 TiB more were requested"),
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


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TWICE = """
import json
import steplab
for times in (1, 2):
    run = steplab.measure("tiny", layout="dp=2", steps=3, context=32 * times)
    print(json.dumps({"id": run.id, "ranks": len(run.ranks), "status": run.status}), flush=True)
"""


@pytest.mark.parametrize(
    ("fault", "said", "status"),
    [
        ("killed", "exitcode  : -9", "crashed"),
        ("raises", "ValueError: the third batch is spoilt", "error"),
        ("hangs", "did not end within 40.0 s: it is at work/faulty.py:", "timeout"),
    ],
)
def test_a_rank_of_torchrun_that_fails_ends_the_others_in_nccl(
    steplab: Program, fault: str, said: str, status: str
) -> None:
    words = ("-m", "steplab", "run", "--model", f"faulty:{fault}", "--timeout", "40s")
    ended = subprocess.run(
        [*TORCHRUN, *words], cwd=steplab.cwd, env=steplab.environment, capture_output=True, timeout=2 * PROMPTLY_S
    )
    assert ended.returncode == 1
    assert said in ended.stderr.decode()
    assert [row["status"] for row in steplab.rows()] == [status]


def test_a_program_under_torchrun_measures_twice(steplab: Program) -> None:
    steplab.write("twice.py", TWICE)
    ended = subprocess.run(
        [*TORCHRUN, "twice.py"], cwd=steplab.cwd, env=steplab.environment, capture_output=True, timeout=PROMPTLY_S
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stdout.count(b'"ranks": 2, "status": "ok"') == 2 * 2


def test_cells_that_had_ended_are_stored_when_torchrun_is_interrupted(steplab: Program) -> None:
    words = ("-m", "steplab", "comm", "--size", "1KB,1GB", "--collective", "all_reduce", "--repeats", "3000")
    with (steplab.folder / "errors").open("wb") as errors:
        launcher = subprocess.Popen(
            [*TORCHRUN, *words], cwd=steplab.cwd, env=steplab.environment, stderr=errors, start_new_session=True
        )
    wait_until(lambda: b"[1/2]" in (steplab.folder / "errors").read_bytes(), "the first cell", timeout_s=PROMPTLY_S)
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=PROMPTLY_S) != 0
    (row,) = steplab("list", "--kind", "comm", "--format", "json").rows()
    assert row["status"] == "ok"
