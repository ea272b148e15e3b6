"""Ends commands at random moments and examines the leftovers.

A try starts `sweep`, `import`, `comm` or `ddp` over two CPU ranks and ends it after a random part of its usual time: by
`kill -9`, SIGTERM, a hang-up, Ctrl-C once or twice, or `kill -9` of a measuring process. All tries share a store and a
temporary folder. Afterwards:

- no process of the command lives for more than 5 s, and the exit code is the signal's;
- the store is whole, no earlier record has changed, and each reported cell is stored;
- an import is stored whole or not at all;
- no temporary folder is left, except one after `kill -9`, until the next command.
"""

import contextlib
import hashlib
import random
import re
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import psutil  # type: ignore[import-untyped]
from tests.cli.preloaded import Started
from tests.cli.program import Program, children, finish, is_gone, kill, tiny
from tests.distributed.test_launch import processes_in, without_device
from tests.runs import make_run

from steplab.records.codec import encode

LONGEST_LIFE_S = 5.0
"""Seconds that a process may outlive its command."""
NUM_IMPORTED = 300
MODEL = """
import time

def build(context):
    return lambda: time.sleep(0.01)
"""
COMMANDS = {
    "sweep": ("sweep", *tiny(context="1,2,3", steps="10"), "--model", "quick:build"),
    "import": ("import", "records.jsonl"),
    "comm": ("comm", "--size", "1KB,10KB", "--collective", "all_reduce", "--processes", "2"),
    "ddp": ("ddp", *without_device(), "--variants", "bucketed:1", "--processes", "2"),
}
ENDS = ("kill", "kill", "terminate", "hang up", "interrupt", "interrupt twice", "kill a child")
_SIGNALS = {
    "kill": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "hang up": signal.SIGHUP,
    "interrupt": signal.SIGINT,
    "interrupt twice": signal.SIGINT,
}


@dataclass
class Outcome:
    tries: Counter[str] = field(default_factory=Counter)
    in_time: int = 0
    longest_life_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class Attack:
    def __init__(self, folder: Path, seed: int, durations_s: Mapping[str, float]) -> None:
        self.program = Program(folder)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.program.environment["TMPDIR"] = str(self.temporary)
        self.program.write("quick.py", MODEL)
        self.random = random.Random(seed)
        self.outcome = Outcome()
        self.records: dict[str, str] = {}
        self._durations_s = dict(durations_s)
        self._known = set[str]()
        self._num_imports = 0

    def attempt(self, command: str, end: str) -> None:
        if command not in self._durations_s:
            started_s = time.monotonic()
            result = finish(self._start(command))
            assert result.code == 0, result.stderr
            self._durations_s[command] = time.monotonic() - started_s
            self.records = self._stored()
        delay_s = self.random.uniform(0.0, self._durations_s[command])
        process, started_s = self._start(command), time.monotonic()
        while not (is_over := is_gone(process)) and time.monotonic() - started_s < delay_s:
            time.sleep(0.002)
        if is_over:  # the machine was busier when the time was taken
            self._durations_s[command] = time.monotonic() - started_s
        came_in_time = not is_over
        self._end(process, end)
        result = finish(process)
        for problem in self._problems(command, end, result.code, result.stderr, came_in_time=came_in_time):
            self.outcome.problems.append(f"{command}, {end} after {delay_s:.3f} s: {problem}")
            print(self.outcome.problems[-1], file=sys.stderr, flush=True)
        self.outcome.tries[f"{command}, {end}"] += 1
        self.outcome.in_time += came_in_time

    def _start(self, command: str) -> Started:
        if command == "import":
            self._num_imports += 1
            run = make_run()
            lines = [
                encode(replace(run, id=f"{self._num_imports:06x}{number:06x}")) + b"\n"
                for number in range(NUM_IMPORTED)
            ]
            (self.program.cwd / "records.jsonl").write_bytes(b"".join(lines))
        process = self.program.start(*COMMANDS[command])
        while not is_gone(process) and not _listens(process):  # before, it has done nothing
            time.sleep(0.001)
        return process

    def _end(self, process: Started, end: str) -> None:
        if end == "kill a child":
            of_it = children(process)
            for child in self.random.sample(of_it, min(1, len(of_it))):
                kill(child)
            return
        for _ in range(2 if end == "interrupt twice" else 1):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end between any look at it and this
                process.send_signal(_SIGNALS[end])
            time.sleep(self.random.uniform(0.0, 0.05) if end == "interrupt twice" else 0.0)

    def _problems(self, command: str, end: str, code: int, stderr: str, *, came_in_time: bool) -> Iterator[str]:
        ended_s = time.monotonic()
        while left := processes_in(self.program.folder):
            lived_s = time.monotonic() - ended_s
            if lived_s > LONGEST_LIFE_S:
                yield f"{len(left)} processes are alive {lived_s:.1f} s later"
                for process in left:
                    kill(process)
            time.sleep(0.01)
        self.outcome.longest_life_s = max(self.outcome.longest_life_s, time.monotonic() - ended_s)
        if "Traceback" in stderr or "internal error" in stderr:
            yield f"it printed {stderr!r}"
        number = _SIGNALS.get(end)
        expected = {0, 1} if number is None else {0, -number if number == signal.SIGKILL else 128 + number}
        if code not in expected or (not came_in_time and code != 0):
            yield f"exit code {code}, {stderr!r}"
        before, self._known = self._known, self._left_over()
        if end != "kill" and (left_over := self._known - before):
            yield f"left {left_over}"
        yield from self._problems_of_store(command, stderr)

    def _problems_of_store(self, command: str, stderr: str) -> Iterator[str]:
        before, self.records = self.records, self._stored()
        if changed := [identity for identity, digest in before.items() if self.records.get(identity) != digest]:
            yield f"{len(changed)} earlier records are gone or changed"
        added = len(self.records) - len(before)
        reported = len(re.findall(r"^\[\d+/\d+\]", stderr, re.MULTILINE))
        if command == "sweep" and added < reported:
            yield f"{reported} cells were reported, and {added} are stored"
        if command == "import" and added not in (0, NUM_IMPORTED):
            yield f"{added} of {NUM_IMPORTED} records were imported"

    def _left_over(self) -> set[str]:
        return {path.name for path in self.temporary.iterdir() if path.name.startswith(".steplab-tmp-")}

    def _stored(self) -> dict[str, str]:
        if not self.program.store.exists():
            return {}
        sqlite = sqlite3.connect(self.program.store)
        try:
            if (whole := sqlite.execute("PRAGMA integrity_check").fetchall()) != [("ok",)]:
                self.outcome.problems.append(f"the store is damaged: {whole}")
            if not sqlite.execute("SELECT 1 FROM sqlite_master").fetchone():
                return {}  # killed before the first table was made
            return {
                identity: hashlib.sha256(body).hexdigest()
                for identity, body in sqlite.execute("SELECT id, body FROM record")
            }
        finally:
            sqlite.close()

    def finish(self) -> None:
        result = finish(self._start("comm"))
        if result.code != 0:
            self.outcome.problems.append(f"the last command failed: {result.stderr!r}")
        if folders := self._left_over():
            self.outcome.problems.append(f"after the last command {folders} is left")
        self.program.end_all()


def _listens(process: Started) -> bool:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    except OSError:
        return True
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) & 1 << (signal.SIGHUP - 1))


def attack(
    folder: Path,
    tries: Sequence[tuple[str, str]],
    seed: int,
    *,
    durations_s: Mapping[str, float] = MappingProxyType({}),
) -> Outcome:
    under_attack = Attack(folder, seed, durations_s)
    try:
        for command, end in tries:
            under_attack.attempt(command, end)
        under_attack.finish()
    finally:
        under_attack.program.end_all()
    return under_attack.outcome
