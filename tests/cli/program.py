"""The program as users run it, with its own store and home.

Measuring commands are forked from a process that has imported everything (preloaded.py). Commands that only read and
write records, explain, plan or print help run in the test's process, unless given variables or stdin. Commands under
another program, and some interrupted ones, start as from a shell.
"""

import atexit
import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil  # type: ignore[import-untyped]
import pytest
from tests.cli.preloaded import Preloaded, Started

import steplab
from steplab.cli.app import main

SOURCES = Path(steplab.__file__).parents[1]
REPOSITORY = Path(__file__).parents[2]

_OWN_VARIABLES = ("STEPLAB_", "XDG_")
_DISPLAY_VARIABLES = ("CI", "COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM")
OF_EVERY_COMMAND = {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCES), os.environ.get("PYTHONPATH")))),
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",  # two test processes share few cores
    "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "torchinductor_tests"),  # homes are new in each test
}
_OF_RECORDS = frozenset(
    ("list", "show", "report", "export", "import", "compare", "history", "rm", "tag", "note", "schema", "store")
)
_OF_MODELS = frozenset(("explain", "plan"))
_COMMAND_TIMEOUT_S = 120.0
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    stdout: str
    stderr: str

    def rows(self) -> list[dict[str, Any]]:
        rows = json.loads(self.stdout)
        assert isinstance(rows, list)
        return rows


@dataclass
class Program:
    folder: Path
    started: list[psutil.Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cwd = self.folder / "work"
        self.store = self.folder / "store" / "store.db"
        home = self.folder / "home"
        for made in (self.cwd, self.store.parent, home):
            made.mkdir(parents=True, exist_ok=True)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_OWN_VARIABLES) and name not in _DISPLAY_VARIABLES
        }
        self.environment = (
            inherited
            | {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), "STEPLAB_STORE": str(self.store)}
            | OF_EVERY_COMMAND
        )

    def __call__(
        self,
        *arguments: str | Path,
        prefix: Sequence[str] = (),
        stdin: bytes = b"",
        variables: Mapping[str, str] | None = None,
        timeout_s: float = _COMMAND_TIMEOUT_S,
    ) -> Result:
        if _starts_nothing([str(argument) for argument in arguments]) and not (prefix or stdin or variables):
            return self.here(*arguments)
        environment = self.environment | dict(variables or {})
        if prefix:
            finished = subprocess.run(
                [*prefix, *command(arguments)],
                input=stdin,
                capture_output=True,
                cwd=self.cwd,
                env=environment,
                timeout=timeout_s,
                check=False,
            )
            return _result(finished.returncode, finished.stdout, finished.stderr)
        process = self._forked("steplab", arguments, environment, stdin)
        try:
            return finish(process, timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise

    def here(self, *arguments: str | Path) -> Result:
        out, errors = io.StringIO(), io.StringIO()
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors)
        with patch.dict(os.environ, self.environment, clear=True), contextlib.chdir(self.cwd), streams[0], streams[1]:
            code = main([str(argument) for argument in arguments])
        return Result(code=code, stdout=out.getvalue(), stderr=remarks(errors.getvalue()))

    def start(self, *arguments: str | Path, module: str = "steplab") -> Started:
        process = self._forked(module, arguments, self.environment)
        self.started.append(process)
        return process

    def _forked(
        self, module: str, arguments: Sequence[str | Path], environment: dict[str, str], stdin: bytes = b""
    ) -> Started:
        words = [str(argument) for argument in arguments]
        return preloaded().start(module, words, cwd=str(self.cwd), environment=environment, stdin=stdin)

    def start_from_shell(self, *arguments: str | Path) -> psutil.Popen:
        process = psutil.Popen(
            command(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.cwd,
            env=self.environment,
            process_group=0,
            # A shell's background job, and so perhaps this test, ignores SIGINT, and would hand that down.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def write(self, name: str, text: str) -> Path:
        path = self.cwd / name
        path.write_text(text, encoding="utf-8")
        return path

    def rows(self) -> list[dict[str, Any]]:
        listed = self("list", "--format", "json")
        return listed.rows() if listed.code == 0 else []

    def end_all(self) -> None:
        for process in self.started:
            for victim in [*children(process), process]:
                kill(victim)
            process.communicate()


@cache
def preloaded() -> Preloaded:
    whose = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    place = Path(tempfile.gettempdir()) / f"steplab-tests-{whose}.socket"
    made = Preloaded(place, dict(os.environ) | OF_EVERY_COMMAND | {"PYTHONDONTWRITEBYTECODE": ""})
    atexit.register(made.close)
    return made


def _starts_nothing(words: Sequence[str]) -> bool:
    if not words or "--help" in words or words[0] == "--version":
        return True
    return words[0] in _OF_RECORDS or (
        words[0] in _OF_MODELS and not any(word == "--try" or ":" in word for word in words)
    )


def tiny(**changes: str) -> tuple[str, ...]:
    options = {"device": "cpu", "batch": "1", "context": "8", "warmup": "1", "steps": "3"} | changes
    return tuple(word for name, value in options.items() for word in (f"--{name}", value))


def command(arguments: Sequence[str | Path]) -> list[str]:
    return [sys.executable, "-m", "steplab", *map(str, arguments)]


def finish(process: psutil.Process, timeout_s: float = _COMMAND_TIMEOUT_S) -> Result:
    stdout, stderr = process.communicate(timeout=timeout_s)
    return _result(process.returncode, stdout, stderr)


def _result(code: int, stdout: bytes, stderr: bytes) -> Result:
    return Result(code=code, stdout=stdout.decode(), stderr=remarks(stderr.decode()))


def remarks(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.endswith(" …\n"))


def kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [] if is_gone(process) else list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(_POLL_S)


def read_process(path: Path, what: str) -> psutil.Process:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), what)
    return psutil.Process(int(path.read_text()))


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


def complaint(result: Result, code: int) -> str:
    assert "Traceback" not in result.stderr
    assert result.code == code, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("steplab: ")
    assert "internal error" not in lines[0]
    assert result.stdout == ""
    return lines[0]


def without_privileges() -> list[str]:
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("root ignores permissions, and there is no setpriv to give them up")
    return [setpriv, "--bounding-set=-all", "--inh-caps=-all"]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, complete = base / name, base / f"{name}.complete"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            complete.touch()
    return folder


def keep_result(result: Result, path: Path) -> None:
    path.write_text(json.dumps(vars(result)), encoding="utf-8")


def kept_result(path: Path) -> Result:
    return Result(**json.loads(path.read_text(encoding="utf-8")))
