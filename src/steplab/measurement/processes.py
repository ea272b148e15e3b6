"""Processes that are started to measure: ended with all that they started, and heard out when they fail."""

import contextlib
import dataclasses
import os
import signal
import subprocess
from typing import IO, Any

from steplab.records.run import Failure

_LAST_LINES = 12


def crash(returncode: int, stage: str, last_lines: tuple[str, ...]) -> Failure:
    """What to say of a process that ended without a last word."""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = "; the kernel does this when memory runs out" if name == "SIGKILL" else ""
        message = f"the process was ended by {name} during {stage}{hint}"
    else:
        name = None
        message = f"the process ended during {stage} with exit code {returncode}"
    return Failure(kind="crashed", message=message, phase=stage, signal=name, last_lines=last_lines)


def named(failure: Failure, rank: int, host: str | None) -> Failure:
    """The failure of one of several processes, which its message names."""
    name = f"rank {rank} on {host}" if host else f"rank {rank}"
    return dataclasses.replace(failure, rank=rank, message=f"{name}: {failure.message}")


def end_group_with(child: subprocess.Popen[Any]) -> None:
    """End what a child leaves behind as it ends: a forked data loader would keep the pipe open for ever."""
    child.wait()
    kill_group(child)


def end(child: subprocess.Popen[Any]) -> None:
    """No child outlives the call that made it, nor does what the child started."""
    kill_group(child)
    child.wait()
    if child.stdin:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


def kill_group(child: subprocess.Popen[Any]) -> None:
    """End a process that leads its session, and all that it started there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        os.killpg(child.pid, signal.SIGKILL)


def tail(errors: IO[bytes]) -> tuple[str, ...]:
    """The last lines of what a process wrote."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 16_384))
    text = errors.read().decode("utf-8", errors="replace")
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-_LAST_LINES:]
