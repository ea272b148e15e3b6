"""Processes that are started to measure: how they are ended, with all that they started, and how their failures are
reported."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from steplab.errors import SteplabError
from steplab.measurement.machine.causes import cause_of
from steplab.records.codec import encode
from steplab.records.failure import Failure
from steplab.records.validation import cleaned

_LAST_LINES = 12


def crash(returncode: int | None, stage: str, last_lines: tuple[str, ...]) -> Failure:
    """The Failure of a process that ended without a last message, or closed its connection and did not end (None)."""
    if returncode is None:
        name, message = None, f"the process closed its connection during {stage} and did not end"
    elif returncode < 0:
        name = signal.Signals(-returncode).name
        hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
        message = f"the process was ended by {name} during {stage}{hint}"
    else:
        name = None
        message = f"the process ended during {stage} with exit code {returncode}"
    cause = cause_of("\n".join(last_lines))
    return Failure(
        kind=cause.kind if cause and cause.kind != "error" else "crashed",
        message=f"{cause.words} ({message})" if cause else message,
        phase=stage,
        signal=name,
        last_lines=last_lines,
    )


def unreadable(why: object, stage: str, last_lines: tuple[str, ...] = ()) -> Failure:
    """The Failure of a process that sent what is no message; something else in the process may have written it."""
    message = f"the process sent an unreadable message during {stage}: {why}"
    return Failure(kind="error", message=cleaned(message), phase=stage, last_lines=last_lines)


def named(failure: Failure, rank: int, host: str | None) -> Failure:
    """The failure of one of several processes, with its rank in the message."""
    name = f"rank {rank} on {host}" if host else f"rank {rank}"
    return dataclasses.replace(failure, rank=rank, message=f"{name}: {failure.message}")


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that leads its session. Raises SteplabError if the system does not let it start."""
    try:
        return subprocess.Popen(words, start_new_session=True, **options)
    except OSError as error:
        why = error.strerror or error
        raise SteplabError(f"cannot start a process to measure in: {why}; end other programs and try again") from error


def end_group_with(child: subprocess.Popen[Any]) -> None:
    """End what a child left behind when it ended: a forked data loader would keep the pipe open forever."""
    child.wait()
    kill_group(child)


def end(child: subprocess.Popen[Any]) -> None:
    """End a child and everything that it started."""
    kill_group(child)
    child.wait()
    if child.stdin:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


def kill_group(child: subprocess.Popen[Any]) -> None:
    """End a process that leads its session, and all that it started there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
        os.killpg(child.pid, signal.SIGKILL)


def tail(errors: IO[bytes]) -> tuple[str, ...]:
    """The last lines that a process wrote, without what would steer a terminal."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 16_384))
    text = errors.read().decode("utf-8", errors="replace")
    return tuple(cleaned(line.rstrip()) for line in text.splitlines() if line.strip())[-_LAST_LINES:]


class Started:
    """A process that leads its session; its standard streams go to a file."""

    def __init__(
        self, words: Sequence[str], told: object, environment: Mapping[str, str], pass_fds: Sequence[int]
    ) -> None:
        """Start it, with `told` as one line of JSON on its standard input."""
        self._written = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as given:  # with a pipe this process would wait until it is read
            given.write(encode(told) + b"\n")
            given.seek(0)
            with contextlib.ExitStack() as undone:
                undone.callback(self._written.close)
                self._process = start(
                    words,
                    stdin=given,
                    stdout=self._written,
                    stderr=self._written,
                    env=environment,
                    pass_fds=pass_fds,
                )
                undone.pop_all()

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """The exit code, after waiting for at most `wait_s`; negative for a signal, None if the process still runs."""
        if self._process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                kill_group(self._process)  # processes that it left behind would keep its connections open
        return self._process.returncode

    def last_lines(self) -> tuple[str, ...]:
        """The last lines of its standard streams."""
        return tail(self._written)

    def end(self) -> None:
        """End it, with all that it started."""
        if self.exit_code() is None:
            end(self._process)
        self._written.close()


class Watchdog:
    """Ends the child at the time limit."""

    def __init__(self, child: subprocess.Popen[bytes], timeout_s: float | None) -> None:
        if timeout_s is not None:
            timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self.timeout_s = timeout_s
        self.fired = False
        self._child = child
        self._timer: threading.Timer | None = None
        self.renew()

    def renew(self) -> None:
        """Restart the time limit."""
        self.cancel()
        if self.timeout_s is not None:
            self._timer = threading.Timer(self.timeout_s, self._fire)
            self._timer.daemon = True
            self._timer.start()

    def _fire(self) -> None:
        self.fired = True
        kill_group(self._child)

    def cancel(self) -> None:
        if self._timer:
            self._timer.cancel()
