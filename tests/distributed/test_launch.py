import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from tests.cli.preloaded import Started
from tests.cli.program import Program, finish, kill, tiny, wait_until
from tests.first import first
from tests.sure import sure

from steplab.measurement.machine.world import private_meeting_place
from steplab.records.codec import decode
from steplab.records.run import Run

HERE = socket.gethostname()
PROMPTLY_S = 30.0
"""Seconds far above a normal end, and far below the timeouts under test."""


def processes_in(folder: Path) -> list[psutil.Process]:
    """Processes with this working folder: ranks lead sessions, and have no parent once a command is killed."""
    return [process for process in psutil.process_iter() if _works_in(process, folder)]


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False


def test_two_processes_make_one_record(steplab: Program) -> None:
    result = steplab("run", *without_device(), "--processes", "2", "--data-parallel", "flat", "--format", "json")
    assert result.code == 0, result.stderr
    (row,) = result.rows()
    assert (row["processes"], row["layout"], row["data_parallel"], row["bucket_size_mb"]) == (2, "dp=2", "flat", None)
    run = shown(steplab, row["id"])
    check_two_ranks(run)
    text = steplab("show", run.id).stdout
    assert "layout dp=2 · flat" in text
    assert "over 2 ranks" in text


def check_two_ranks(run: Run) -> None:
    assert run.spec is not None
    assert run.timing is not None
    assert run.environment is not None
    assert [(rank.rank, rank.host) for rank in run.ranks] == [(0, HERE), (1, HERE)]
    assert run.ranks[0].back_to_back == run.timing.back_to_back
    assert run.ranks[1].back_to_back != run.timing.back_to_back
    for rank in run.ranks:
        assert [phase.phase for phase in rank.back_to_back] == [
            *("forward", "backward", "gradient sync", "optimizer", "step")
        ]
        assert all(len(phase.best_s) == run.spec.steps for phase in rank.back_to_back)
        assert rank.device_name == run.environment.device.name
        assert rank.host_peak_bytes
    assert run.tokens_per_step == 2 * run.spec.tokens
    assert {used.num_devices for used in run.utilizations} == {2}


@pytest.mark.parametrize(
    ("fault", "processes", "told"),
    [
        ("out_of_memory", 2, "out of memory: rank 1 on {host}: 2.00 GiB more were requested (measure)"),
        ("raises", 2, "error: rank 1 on {host}: ValueError: the third batch is spoilt"),
        ("killed", 8, "crashed: rank 1 on {host}: the process was ended by SIGKILL during measure"),
    ],
)
def test_a_rank_that_fails_ends_the_run_and_is_named(steplab: Program, fault: str, processes: int, told: str) -> None:
    steplab("--version")  # so that what imports torch once for all tests is not timed
    started_s = time.monotonic()
    result = steplab("run", *without_device(), "--model", f"faulty:{fault}", "--processes", str(processes))
    assert time.monotonic() - started_s < PROMPTLY_S
    assert result.code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"steplab: {told.format(host=HERE)}")
    (row,) = steplab.rows()
    failure = sure(shown(steplab, row["id"]).failure)
    assert failure.rank == 1
    assert failure.phase == "measure"


def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it(steplab: Program) -> None:
    options = ("--model", "faulty:hangs", "--processes", "2", "--timeout", "5s")
    result = steplab("run", *without_device(), *options)
    assert result.code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"steplab: timeout: rank 1 on {HERE}: did not end within 5.00 s: it is at work/faulty.py:")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--processes", "2", "--layout", "dp=4"), "layout dp=4 takes 4 processes, not 2; use --processes 4"),
        (("--processes", "2", "--device", "cuda"), "--processes is for the CPU, and the device is cuda"),
        (("--processes", "2", "--gpus", "2"), "not both"),
        (("--layout", "dp=2", "--device", "cuda:1"), "device cuda:1 is one device, but layout dp=2 takes 2"),
        (("--model", "faulty:whole_step", "--processes", "2"), "layout dp=2 for faulty:whole_step is not supported"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(steplab: Program, options: tuple[str, ...], told: str) -> None:
    result = steplab("run", *without_device(), *options)
    assert result.code == 2
    (line,) = result.stderr.splitlines()
    assert told in line
    assert steplab.rows() == []


def test_a_pipeline_of_another_model_is_refused_before_any_rank_starts(steplab: Program) -> None:
    result = steplab("run", *tiny(batch="2", model="faulty:raises", layout="pp=2"))
    assert result.code == 2
    (line,) = result.stderr.splitlines()
    assert "only steplab's own Transformer is split along tp and pp" in line


def test_no_rank_outlives_a_command_that_is_killed(steplab: Program) -> None:
    options = ("--model", "faulty:hangs", "--processes", "2", "--context", "8")
    temporary = steplab.folder / "temporary"
    temporary.mkdir()
    steplab.environment["TMPDIR"] = str(temporary)
    process = steplab.start("run", *options)
    everyone = 3  # the command and two ranks
    wait_until(lambda: len(processes_in(steplab.folder)) == everyone, "two ranks", timeout_s=60)
    process.kill()
    process.wait(timeout=PROMPTLY_S)  # the fixture waits for the others
    wait_until(lambda: not list(temporary.glob("steplab-*")), "the end of their folder", timeout_s=10)


def test_two_launchers_join_and_the_first_rank_stores(steplab: Program) -> None:
    other = Program(steplab.folder / "other machine", started=steplab.started)
    port = free_port()
    launchers = [
        torchrun(program, "--nnodes", "2", "--node-rank", str(node), "--master-port", str(port))
        for node, program in enumerate((steplab, other))
    ]
    outputs = [launcher.communicate(timeout=120) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    (row,) = json.loads(outputs[0][0])
    assert outputs[1][0] == b""
    check_two_ranks(shown(steplab, row["id"]))
    assert not other.store.exists()


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("killed", -signal.SIGKILL, "crashed: rank 0 on {host}: another rank ended during measure: "),
        ("raises", 1, "error: rank 1 on {host}: ValueError: the third batch is spoilt"),
    ],
)
def test_what_ended_a_rank_is_in_the_record_of_the_first_if_the_rank_could_say_so(
    steplab: Program, fault: str, code: int, told: str
) -> None:
    commands = start_joined(steplab, "run", *tiny(), "--model", f"faulty:{fault}")
    first, second = (finish(process) for process in commands)
    assert (first.code, second.code) == (1, code)
    assert first.stderr.startswith(f"steplab: {told.format(host=HERE)}")
    assert second.stderr == (first.stderr if fault == "raises" else "")
    assert second.stdout == ""
    (row,) = steplab.rows()
    failure = sure(shown(steplab, row["id"]).failure)
    assert failure.phase == "measure"


@pytest.mark.release
def test_each_joined_rank_says_where_it_stands_when_the_time_is_over(steplab: Program) -> None:
    commands = start_joined(steplab, "run", *tiny(), "--model", "faulty:hangs", "--timeout", "10s")
    first, second = (finish(process) for process in commands)
    assert (first.code, second.code) == (1, 1)
    assert f"timeout: rank 0 on {HERE}: did not end within 10.0 s: it waits for other ranks at " in first.stderr
    assert f"timeout: rank 1 on {HERE}: did not end within 10.0 s: it is at work/faulty.py:" in second.stderr
    assert [row["status"] for row in steplab.rows()] == ["timeout"]


@pytest.mark.parametrize("end", first(1, [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
def test_cells_that_had_ended_are_stored_however_joined_ranks_end(steplab: Program, end: signal.Signals) -> None:
    """Ctrl-C reaches all ranks; torchrun ends the others by SIGTERM once one has failed; a killed rank says nothing."""
    words = ("comm", "--size", "1KB,64MB", "--collective", "all_reduce", "--repeats", "1000")
    commands = start_joined(steplab, *words)
    first, second = commands
    wait_until(lambda: b"[1/2]" in os.pread(first._files[1].fileno(), 1 << 16, 0), "the end of the first cell")
    for process in {signal.SIGINT: commands, signal.SIGTERM: [first], signal.SIGKILL: [second]}[end]:
        process.send_signal(end)
    result = finish(first)
    assert result.code == (130 if end is signal.SIGINT else 1), result.stderr
    kill(second)
    finish(second)
    (row,) = steplab("list", "--kind", "comm", "--format", "json").rows()
    record: Any = decode(steplab("show", row["id"], "--format", "json").stdout)
    assert [cell.status for cell in record.cells] == (["ok"] if end is signal.SIGINT else ["ok", "crashed"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "--layout", "dp=4"), "torchrun started 2 processes, but layout dp=4 takes 4"),
        (("study", "quick"), "torchrun started 2 processes, and each would measure the whole study"),
        (("ab", "--precision bf16"), "torchrun started 2 processes, and each would alternate steps"),
    ],
)
def test_another_number_of_processes_than_torchrun_started_is_refused(
    steplab: Program, words: tuple[str, ...], told: str
) -> None:
    for rank in (0, 1):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        result = steplab(*words, variables=variables)
        assert result.code == 2
        assert (told in result.stderr) == (rank == 0)
        assert len(result.stderr.splitlines()) == (1 if rank == 0 else 0)


def start_joined(program: Program, *words: str) -> list[Started]:
    """Start one command per rank, as a launcher without a store does."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    commands = []
    for rank in ("0", "1"):
        one = Program(program.folder, started=program.started)
        one.environment |= place | {"RANK": rank, "LOCAL_RANK": rank}
        commands.append(one.start(*words))
    return commands


def torchrun(program: Program, *words: str) -> Started:
    around = ("--master-addr", "127.0.0.1", "--local-addr", "127.0.0.1", *words)
    run = ("-m", "steplab", "run", *tiny(), "--format", "json")
    return program.start(*around, *run, module="torch.distributed.run")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def without_device() -> tuple[str, ...]:
    words = tiny()
    at = words.index("--device")
    return words[:at] + words[at + 2 :]


def shown(program: Program, identity: str) -> Run:
    record: Any = decode(program("show", identity, "--format", "json").stdout)
    assert isinstance(record, Run)
    return record


def test_a_rank_does_not_wait_for_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        private_meeting_place(str(tmp_path / "gone"), 2)
