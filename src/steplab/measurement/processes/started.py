"""Start measuring processes in their own sessions, end them, and report how they ended.

A command and its processes lock their temporary folder. The kernel releases the lock when the last of them ends,
however it ends, and the next command removes unlocked folders.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steplab.errors import SteplabError
from steplab.measurement.machine.causes import cause_of
from steplab.records.failure import Failure
from steplab.records.validation import cleaned

_LAST_LINES = 12


def crash(returncode: int | None, stage: str, last_lines: tuple[str, ...]) -> Failure:
    """Failure of a process that ended without a result; return code None: it did not end."""
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
    """Failure for an unreadable message, which a user's code may have written."""
    message = f"the process sent an unreadable message during {stage}: {why}"
    return Failure(kind="error", message=cleaned(message), phase=stage, last_lines=last_lines)


def named(failure: Failure, rank: int, host: str | None) -> Failure:
    name = f"rank {rank} on {host}" if host else f"rank {rank}"
    return dataclasses.replace(failure, rank=rank, message=f"{name}: {failure.message}")


class Started:
    """A process that leads its own session; its output goes to a file."""

    def __init__(self, words: Sequence[str], **options: Any) -> None:
        """`options`: further ones of subprocess.Popen."""
        self._written = tempfile.TemporaryFile()  # noqa: SIM115
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": self._written, "stderr": self._written}
        try:
            self._process = subprocess.Popen(words, **streams, **options, start_new_session=True)
        except OSError as error:
            self._written.close()
            why = error.strerror or error
            raise SteplabError(
                f"cannot start a process to measure in: {why}; end other programs and try again"
            ) from error

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """Exit code, negative for a signal; None if still running after `wait_s`."""
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


_PREFIX = ".steplab-tmp-"
_NAME = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    path: Path
    lock: int
    """File descriptor of the lock, for a process that may outlive this one."""


@contextmanager
def scratch_folder(beside: Path | None = None) -> Iterator[Scratch]:
    """A folder that only this user can open, in `beside` or the one for temporary files, removed on leaving.

    Raises OSError if it cannot be made.
    """
    parent = beside or Path(tempfile.gettempdir())
    remove_left_over(parent)
    scratch = _made(parent)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch.path, ignore_errors=True)
        os.close(scratch.lock)


def remove_left_over(parent: Path) -> None:
    """Remove this user's unlocked temporary folders in `parent`.

    Without locks, as in some network folders, none is removed.
    """
    try:
        with os.scandir(parent) as entries:
            found = [entry.path for entry in entries if _NAME.fullmatch(entry.name) and _is_own_folder(entry)]
    except OSError:  # a folder that may be written to and not be listed
        return
    for path in found:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # another process has removed it
            continue
        try:
            if _lock(descriptor, wait=False):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _made(parent: Path) -> Scratch:
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        _lock(descriptor, wait=True)
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return Scratch(path=Path(path), lock=descriptor)
        except FileNotFoundError:
            pass  # another process took it for left over, before it was locked
        os.close(descriptor)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()


def _lock(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
