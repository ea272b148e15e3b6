"""One measuring process: started with a request, heard until it has answered, ended with all that it started."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from steplab.measurement.processes.listener import Listener
from steplab.measurement.processes.messages import BadMessage, Order, Request
from steplab.measurement.processes.started import Watchdog, crash, end, end_group_with, start, tail, unreadable
from steplab.records.codec import encode
from steplab.records.failure import Failure
from steplab.units import format_time

_EXIT_S = 10.0
"""How long a child may take to exit after its answer."""
_WRAPPER_EXIT_S = 600.0
"""How long the profiler around a child may take to write what it recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """Where a process runs and what it imports."""

    folder: Path | None = None
    """Its working folder, from which it imports a user's model; None: this process's."""
    environment: Mapping[str, str] | None = None
    """All of its environment variables; None: this process's."""


HERE = Surroundings()
"""The surroundings of this process."""


class Conversation:
    """A measuring process and the messages of it; a context manager that ends the process."""

    def __init__(
        self,
        module: str,
        order: Request | Order | None,
        listener: Listener,
        timeout_s: float | None,
        *,
        wrapper: Sequence[str] = (),
        surroundings: Surroundings = HERE,
        ahead_of: str | None = None,
    ) -> None:
        """Start `python -m module`. `timeout_s` limits each time that this process waits for it. Without an order it
        loads what the job `ahead_of` needs, and is ready for `begin` then.

        Raises SteplabError if the system does not let it start.
        """
        self._listener, self._wrapper = listener, wrapper
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        read_fd, write_fd = os.pipe()
        self._pipe = os.fdopen(read_fd, "rb")
        with contextlib.ExitStack() as undone:
            undone.callback(self._errors.close)
            undone.callback(self._pipe.close)
            try:
                self._child = start(
                    [*wrapper, sys.executable, "-m", module, str(write_fd), *([ahead_of] if ahead_of else [])],
                    stdin=subprocess.PIPE,
                    stdout=self._errors,
                    stderr=self._errors,
                    cwd=surroundings.folder,
                    env=surroundings.environment,
                    pass_fds=[write_fd],
                )
            finally:
                os.close(write_fd)
            undone.pop_all()
        self._watchdog = Watchdog(self._child, timeout_s)
        threading.Thread(target=end_group_with, args=(self._child,), daemon=True).start()
        listener.renew = self._watchdog.renew
        if order is not None:
            self._tell(order)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def listen(self) -> Failure | None:
        """Hear the process until its last message, or until it waits for a turn; gives its failure.

        Raises the SteplabError of a refused request.
        """
        try:
            self._listener.listen(self._pipe)
        except BadMessage as error:
            self._watchdog.cancel()
            end(self._child)
            return unreadable(error, self._listener.progress.stage, tail(self._errors))
        if self._listener.is_ready:
            self._watchdog.cancel()
            return None
        # it has answered, or closed its pipe: either way it can say nothing more
        exit_s = _WRAPPER_EXIT_S if self._wrapper else _EXIT_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=exit_s)
        self._watchdog.cancel()
        returncode = self._child.returncode
        end(self._child)
        return self._failure(returncode)

    def begin(self, order: Request, timeout_s: float | None) -> None:
        """Give a process that was started without one its order, and its time limit."""
        self._watchdog = Watchdog(self._child, timeout_s)
        self._listener.renew = self._watchdog.renew
        self._tell(order)

    def give(self, turn: object) -> Failure | None:
        """Give the process its next turn, and listen as `listen` does until the turn is over."""
        self._watchdog.renew()
        self._tell(turn)
        return self.listen()

    def end(self) -> None:
        """End the process and everything that it started."""
        self._watchdog.cancel()
        end(self._child)
        self._pipe.close()
        self._errors.close()

    def _tell(self, line: object) -> None:
        assert self._child.stdin is not None
        # a child that dies at once cannot be written to; its exit is what gets reported
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(encode(line) + b"\n")
            self._child.stdin.flush()

    def _failure(self, returncode: int | None) -> Failure | None:
        """The failure of a child without a last message; `returncode` is None if it did not end by itself.

        Raises the error of a refused request.
        """
        listener, watchdog = self._listener, self._watchdog
        if listener.refusal is not None:
            raise listener.refusal
        if listener.answered:
            return None
        stage = listener.progress.stage
        if watchdog.fired:
            assert watchdog.timeout_s is not None
            message = f"did not end within {format_time(watchdog.timeout_s)}"
            return Failure(kind="timeout", message=message, phase=stage, last_lines=tail(self._errors))
        return crash(returncode, stage, tail(self._errors))
