import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from tests.cli.preloaded import Started
from tests.cli.program import Program, finish, is_gone, kill, read_process, tiny, wait_until
from tests.first import first

from steplab.cli.ending import Ending

MODEL = '''
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def tell(name, pid):
    Path(name).write_text(f"{pid}\\\\n")


def build(context):
    """A step that does nothing; at context 2, it is not ready before the file `hold` is gone."""
    if context == 2:
        tell("measuring.pid", os.getpid())
        while Path("hold").exists():
            time.sleep(0.02)
    return lambda: None


def with_helper():
    """Starts a program, as a data loader or a compiler does, and is never ready."""
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    tell("helper.pid", helper.pid)
    tell("measuring.pid", os.getpid())
    time.sleep(120)


def fork_helper():
    """Leaves a forked process, which has everything open that this one has."""
    pid = os.fork()
    if pid == 0:
        time.sleep(120)
        os._exit(0)
    tell("helper.pid", pid)


def leaves_helper():
    fork_helper()
    return lambda: None


def crashes_beside_helper():
    fork_helper()
    os.kill(os.getpid(), signal.SIGSEGV)
'''.replace("\\\\", "\\")

SWEEP = ("sweep", *tiny(context="1,2,3"), "--model", "held:build")
LONGEST_HANG_S = 20.0
"""Far less than the helpers live."""


@pytest.fixture
def held(steplab: Program) -> Program:
    steplab.write("held.py", MODEL)
    steplab.write("hold", "")
    return steplab


def start_until_second_cell(held: Program) -> tuple[Started, psutil.Process]:
    sweep = held.start(*SWEEP)
    measuring = read_process(held.cwd / "measuring.pid", "the second cell is under way")
    assert len(held.rows()) == 1, "the first cell is stored before the second begins"
    assert measuring in sweep.children(recursive=True)
    return sweep, measuring


def resume(held: Program) -> list[str]:
    (held.cwd / "hold").unlink()
    resumed = held(*SWEEP, "--resume", "--format", "json")
    assert resumed.code == 0, resumed.stderr
    assert [(row["context"], row["status"]) for row in resumed.rows()] == [(1, "ok"), (2, "ok"), (3, "ok")]
    return [line for line in resumed.stderr.splitlines() if line.startswith("[")]


def test_killing_the_sweep_ends_the_measuring_process_and_keeps_what_was_finished(held: Program) -> None:
    sweep, measuring = start_until_second_cell(held)
    [first] = held.rows()
    kill(sweep)
    wait_until(lambda: is_gone(measuring), "the measuring process ends with its parent")
    assert finish(sweep).code == -signal.SIGKILL
    assert held.rows() == [first]

    lines = resume(held)
    assert [line.split("]")[0] for line in lines] == ["[1/2", "[2/2"], "the first cell is not measured again"
    rows = held.rows()
    assert [row["context"] for row in rows] == [3, 2, 1]
    assert rows[-1] == first
    [study] = held("list", "--kind", "study", "--format", "json").rows()
    assert (study["num_cells"], study["num_ok"], study["num_failed"]) == (3, 3, 0)


def test_a_killed_measuring_process_is_a_row_and_the_only_cell_to_be_resumed(held: Program) -> None:
    sweep, measuring = start_until_second_cell(held)
    kill(measuring)
    assert finish(sweep).code == 0
    before = {row["context"]: row for row in held.rows()}
    assert {context: row["status"] for context, row in before.items()} == {1: "ok", 2: "crashed", 3: "ok"}
    assert "SIGKILL" in before[2]["failure"]

    lines = resume(held)
    assert [line.split("]")[0] for line in lines] == ["[1/1"]
    after = {row["context"]: row for row in held.rows()}
    assert [after[1], after[3]] == [before[1], before[3]]
    assert after[2]["id"] != before[2]["id"]
    assert len(held("export").stdout.splitlines()) == 4, "the crash is kept beside the better attempt"

    again = held(*SWEEP, "--resume", "--format", "json")
    assert again.code == 0
    assert "[" not in again.stderr, "nothing is left to measure"
    assert [row["id"] for row in again.rows()] == [after[context]["id"] for context in (1, 2, 3)]


@pytest.mark.parametrize("repeated", first(1, [20, 0]))
def test_ctrl_c_ends_the_sweep_with_its_measuring_process_and_keeps_what_was_finished(
    held: Program, repeated: int
) -> None:
    sweep, measuring = start_until_second_cell(held)
    [first] = held.rows()
    os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does it: to everyone in the foreground
    with suppress(ProcessLookupError, psutil.NoSuchProcess):  # more must not cut the tidying up short
        for _ in range(repeated):
            time.sleep(0.005)
            sweep.send_signal(signal.SIGINT)
    result = finish(sweep)
    assert result.code == 130
    assert is_gone(measuring)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert "--resume" in result.stderr.splitlines()[-1]
    assert held.rows() == [first]


@pytest.mark.parametrize("number", first(1, [signal.SIGHUP, signal.SIGTERM]))
def test_a_sweep_that_is_asked_to_end_does_so_as_after_ctrl_c(held: Program, number: signal.Signals) -> None:
    sweep, measuring = start_until_second_cell(held)
    sweep.send_signal(number)
    result = finish(sweep)
    assert result.code == 128 + number
    assert is_gone(measuring)
    assert result.stderr.splitlines()[-1].startswith(f"steplab: ended by {number.name}; finished measurements")
    assert [row["context"] for row in held.rows()] == [1]


def test_a_signal_long_after_the_first_ends_the_program_at_once(steplab: Program) -> None:
    steplab.write(
        "busy.py",
        f"""
import signal, time
from steplab.cli import ending

ending.TIDYING_S = 0.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with it ignored
listening = ending.Ending()
listening.listen()
try:
    signal.raise_signal(signal.{signal.SIGTERM.name})
finally:
    signal.raise_signal(signal.{signal.SIGINT.name})
    time.sleep(60)
""",
    )
    ended = subprocess.run(
        [sys.executable, "busy.py"], cwd=steplab.cwd, env=steplab.environment, timeout=30, check=False
    )
    assert ended.returncode == 128 + signal.SIGTERM


def test_a_signal_in_a_finalizer_ends_the_program_all_the_same(steplab: Program) -> None:
    """Python drops exceptions in finalizers."""
    steplab.write(
        "finalizing.py",
        """
import os, signal, time
from steplab.cli import ending

listening = ending.Ending()
listening.listen()

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

try:
    Dropped()
    time.sleep(60)
except KeyboardInterrupt:
    print(listening.exit_code)
""",
    )
    ended = subprocess.run(
        [sys.executable, "finalizing.py"],
        cwd=steplab.cwd,
        env=steplab.environment,
        timeout=30,
        check=False,
        capture_output=True,
    )
    assert (ended.stdout, ended.stderr) == (b"143\n", b"")


def test_what_the_parent_ignores_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    others = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        Ending().listen()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        for number, handler in {signal.SIGHUP: before, **others}.items():
            signal.signal(number, handler)


# The measuring process's own children


@pytest.fixture
def helper_file(held: Program) -> Path:
    return held.cwd / "helper.pid"


@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGINT])
def test_what_the_model_started_ends_with_the_run_which_stores_nothing(
    held: Program, helper_file: Path, signal_sent: signal.Signals
) -> None:
    start = held.start_from_shell if signal_sent == signal.SIGINT else held.start
    run = start("run", *tiny(), "--model", "held:with_helper")
    measuring = read_process(held.cwd / "measuring.pid", "the measurement is under way")
    helper = read_process(helper_file, "the helper was started")
    try:
        os.killpg(run.pid, signal_sent)
        wait_until(lambda: is_gone(measuring), "the measuring process ends with its parent")
        wait_until(lambda: is_gone(helper), "the helper ends with the measuring process", timeout_s=10)
    finally:
        kill(helper)
    result = finish(run)
    assert (result.code, result.stdout) == (130 if signal_sent == signal.SIGINT else -signal.SIGKILL, "")
    assert "Traceback" not in result.stderr
    assert held.rows() == []


@pytest.mark.parametrize(("model", "code", "said"), [("leaves_helper", 0, ""), ("crashes_beside_helper", 1, "SIGSEGV")])
def test_a_process_that_the_model_leaves_behind_neither_delays_nor_outlives_the_run(
    held: Program, helper_file: Path, model: str, code: int, said: str
) -> None:
    run = held.start("run", *tiny(), "--model", f"held:{model}")
    helper = read_process(helper_file, "the helper was started")
    try:
        wait_until(lambda: is_gone(run), "the run ends though the helper lives", timeout_s=LONGEST_HANG_S)
        wait_until(lambda: is_gone(helper), "the helper ends with the run", timeout_s=10)
    finally:
        kill(helper)
    result = finish(run)
    assert result.code == code, result.stderr
    assert said in result.stderr
