"""Starts measuring processes, ends their whole sessions, and reports how they ended."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from steplab.errors import SteplabError
from steplab.measurement.machine.causes import cause_of
from steplab.records.failure import Failure
from steplab.records.validation import cleaned

_LAST_LINES = 12


def crash(returncode: int | None, stage: str, last_lines: tuple[str, ...]) -> Failure:
    """For a process that ended without a last message, or closed its connection and did not end (None)."""
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
    """A user's code may have written it."""
    message = f"the process sent an unreadable message during {stage}: {why}"
    return Failure(kind="error", message=cleaned(message), phase=stage, last_lines=last_lines)


def named(failure: Failure, rank: int, host: str | None) -> Failure:
    name = f"rank {rank} on {host}" if host else f"rank {rank}"
    return dataclasses.replace(failure, rank=rank, message=f"{name}: {failure.message}")


class Started:
    """Leads its session; standard streams go to a file."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._written = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=self._written,
                stderr=self._written,
                cwd=folder,
                env=environment,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError as error:
            self._written.close()
            why = error.strerror or error
            raise SteplabError(
                f"cannot start a process to measure in: {why}; end other programs and try again"
            ) from error

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """Negative for a signal, None if still running after `wait_s`."""
        if self._process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                self._kill_group()  # processes that it left behind would keep its connection open
        return self._process.returncode

    def last_lines(self) -> tuple[str, ...]:
        size = self._written.seek(0, os.SEEK_END)
        self._written.seek(max(0, size - 16_384))
        text = self._written.read().decode("utf-8", errors="replace")
        return tuple(cleaned(line.rstrip()) for line in text.splitlines() if line.strip())[-_LAST_LINES:]

    def end(self) -> None:
        if self.exit_code() is None:
            self._kill_group()
            self._process.wait()
        self._written.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
            os.killpg(self._process.pid, signal.SIGKILL)
