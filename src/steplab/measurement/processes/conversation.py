"""Starts the processes of one request, receives their messages, and ends them.

Each process inherits its end of a wire, and several meet in a private folder: nothing listens on a port.

A rank that raises, runs out of memory or dies ends the measurement of all at once. A hang ends it after STALL_S without
progress on any rank, or at the user's time limit.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import msgspec

from steplab.errors import SteplabError, UserError
from steplab.measurement.jobs import Job
from steplab.measurement.machine.torchrun import ProcessPlace, environment_of
from steplab.measurement.processes import wire as messages
from steplab.measurement.processes.started import Started, crash, named, scratch_folder, unreadable
from steplab.measurement.progress import OnProgress, Progress
from steplab.python import python_running
from steplab.records.environment import Environment
from steplab.records.failure import Failure
from steplab.records.run import Run
from steplab.records.timing import Turn
from steplab.units import format_time

CHILD = "steplab.measurement.processes.child"
STALL_S = 600.0
"""Most seconds without progress on all ranks: compiling a large model reports nothing for minutes."""
_POLL_S = 0.2
_CAUSE_S = 5.0
"""Seconds to wait for the failing rank's cause after the first sign of trouble."""
_ANSWER_S = 3.0
EXIT_S = 10.0
"""Seconds for processes to exit after their last message."""
_LOST_CONNECTION = ("gloo", "NCCL", "DistBackendError", "DistNetworkError", "DistStoreError", "Connection closed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    folder: Path | None = None
    """Working folder, from which a user's model is imported; None: this process's."""
    environment: Mapping[str, str] | None = None
    """All environment variables; None: this process's."""


HERE = Surroundings()


class Listener:
    """Keep a job's messages, or pass them on to callbacks."""

    def __init__(
        self,
        job: Job,
        on_progress: OnProgress = lambda progress: None,
        *,
        on_environment: Callable[[Environment], None] = lambda environment: None,
        on_facts: Callable[[Any], None] = lambda facts: None,
        on_cell: Callable[[int, Any], None] = lambda number, cell: None,
    ) -> None:
        self.on_progress = on_progress
        self.progress = Progress(stage="starting", done=0, total=0)
        self.environment: Environment | None = None
        self.measured: Run | None = None
        self.is_ready = False
        self.under_way: Sequence[int] = ()
        """Cells that may be the cause if the process dies now."""
        self.result: Any = None
        """Result message; None before it arrives, or if the cells are the result."""
        self.refusal: SteplabError | None = None
        self.answered = False
        self.renew: Callable[[], None] = lambda: None
        self._job, self._on_environment, self._on_facts, self._on_cell = job, on_environment, on_facts, on_cell

    def receive(self, message: messages.Message) -> None:
        """Raises BadMessage for a value of another type."""

        def of(type: Any) -> Any:
            return messages.read(message.value, type)

        match message.kind:
            case "stage":
                stage, total = of(messages.STAGE)
                self._show(Progress(stage=stage, done=0, total=total))
            case "step":
                self._show(Progress(stage=self.progress.stage, done=of(int), total=self.progress.total))
            case "environment":
                self.environment = of(Environment)
                self._on_environment(self.environment)
            case "measured":
                self.measured = of(Run)
            case "ready":
                self.is_ready = True
            case "facts":
                self._on_facts(of(self._job.facts))
            case "at":
                self.under_way = of(tuple[int, ...])
                self.renew()
            case "cell":
                number, cell = of(tuple[int, msgspec.Raw])
                self._on_cell(number, messages.read(cell, self._job.cell))
            case "result":
                self.result, self.answered = of(self._job.result), True
            case "refused":
                exit_code, text = messages.decoded(message.value, tuple[int, str])
                self.refusal = UserError(text) if exit_code == UserError.exit_code else SteplabError(text)
                self.answered = True

    def unless_failed(self, what: str) -> Any:
        """The result. Raises SteplabError, beginning with `what`, if it is a failure."""
        if isinstance(self.result, Failure):
            raise SteplabError(f"{what}: {self.result.message}")
        return self.result

    def _show(self, progress: Progress) -> None:
        self.progress = progress
        self.on_progress(progress)


@dataclass(kw_only=True, slots=True)
class _Rank:
    number: int
    process: Started
    wire: messages.Wire
    stage: str = "starting"
    failure: Failure | None = None
    where: messages.Whereabouts | None = None
    has_ended: bool = False


class Conversation:
    def __init__(
        self,
        request: messages.Request | None,
        listener: Listener,
        timeout_s: float | None,
        *,
        surroundings: Surroundings = HERE,
        ahead_of: str | None = None,
    ) -> None:
        """`timeout_s` limits each wait for the processes. With several of them `surroundings` are ignored. Without a
        request, one process imports the modules of the job `ahead_of`, and is then ready for `begin`.

        Raises SteplabError if the system does not let one start.
        """
        size = request.processes if request is not None else 1
        self.listener, self._is_alone = listener, size == 1
        self._ranks: list[_Rank] = []
        self._gone: list[_Rank] = []
        self._open: dict[Any, _Rank] = {}
        with ExitStack() as opened:
            scratch = opened.enter_context(scratch_folder()) if size > 1 else None
            for number in range(size):
                place = ProcessPlace(rank=number, size=size, local_rank=number, local_size=size)
                wire, theirs = messages.wire_to_a_child()
                opened.callback(wire.connection.close)
                with theirs:
                    process = Started(
                        python_running(CHILD, str(theirs.fileno()), *([ahead_of] if ahead_of else [])),
                        cwd=surroundings.folder,
                        env=surroundings.environment if size == 1 else environment_of(place),
                        pass_fds=[theirs.fileno(), *([scratch.lock] if scratch else [])],
                    )
                opened.callback(process.end)
                self._ranks.append(_Rank(number=number, process=process, wire=wire))
                self._open[wire.connection] = self._ranks[-1]
            if request is not None:
                if scratch is not None:
                    request = msgspec.structs.replace(request, folder=str(scratch.path))
                self._send_all("request", request)
            self._opened = opened.pop_all()
        listener.renew = self._renew
        self._timeout_s = timeout_s
        self._renew()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def listen(self) -> Failure | None:
        """Receive messages until the last one, or until a single process waits for a turn; returns the failure.

        Raises a process's SteplabError.
        """
        listener = self.listener
        listener.is_ready = False
        listener.on_progress(listener.progress)
        failure = self._receive()
        if listener.refusal is not None:
            raise listener.refusal
        if failure is None and not listener.is_ready:
            deadline_s = time.monotonic() + EXIT_S
            for rank in self._ranks:
                rank.process.exit_code(wait_s=max(0.0, deadline_s - time.monotonic()))
        return failure

    def begin(self, request: messages.Request, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._renew()
        self._send_all("request", request)

    def give(self, turn: Turn) -> Failure | None:
        self._renew()
        self._send_all("turn", turn)
        return self.listen()

    def end(self) -> None:
        self._opened.close()

    def _renew(self) -> None:
        self._started_s = self._moved_s = time.monotonic()

    def _send_all(self, kind: messages.Kind, value: object = None) -> None:
        for rank in self._ranks:
            rank.wire.send(kind, value)

    def _receive(self) -> Failure | None:
        listener, trouble_s = self.listener, None
        while not listener.answered:
            self._receive_some()
            if listener.is_ready:
                return None
            for rank in self._ranks:
                if rank.failure is not None and (self._is_alone or not is_suffered(rank.failure)):
                    return self._named(rank, rank.failure)
            now_s = time.monotonic()
            if not self._is_troubled():
                trouble_s = None  # a process ended before its last message was read
            elif trouble_s is None:
                trouble_s = now_s
            if self._gone or (trouble_s is not None and now_s - trouble_s > _CAUSE_S):
                return self._died()
            if self._timeout_s is not None and now_s - self._started_s > self._timeout_s:
                return self._hung(f"did not end within {format_time(self._timeout_s)}")
            if not self._is_alone and now_s - self._moved_s > STALL_S:
                return self._hung(f"made no progress for {format_time(STALL_S)}")
        return None

    def _receive_some(self) -> None:
        if not self._open:
            time.sleep(_POLL_S)
            return
        for connection in wait(list(self._open), _POLL_S):
            rank = self._open[connection]
            try:
                message = rank.wire.receive()
                if message is not None:
                    self._note(rank, message)
                elif not rank.has_ended:
                    self._gone.append(rank)
            except messages.BadMessage as error:
                message = None  # where the next one begins is not known
                rank.failure = unreadable(error, rank.stage, rank.process.last_lines())
            if message is None:
                del self._open[connection]

    def _note(self, rank: _Rank, message: messages.Message) -> None:
        match message.kind:
            case "failed":
                rank.failure = messages.read(message.value, Failure)
            case "where":
                rank.where = messages.read(message.value, messages.Whereabouts)
            case "ended":
                rank.has_ended = True
            case kind:
                self._moved_s = time.monotonic()
                if kind == "stage":
                    rank.stage = messages.read(message.value, messages.STAGE)[0]
                if rank.number == 0 or kind == "refused":
                    self.listener.receive(message)

    def _ended_early(self) -> list[_Rank]:
        return [
            rank
            for rank in self._ranks
            if rank.process.exit_code() is not None and (rank.number == 0 or not rank.has_ended)
        ]

    def _is_troubled(self) -> bool:
        return bool(self._gone or self._ended_early()) or any(rank.failure for rank in self._ranks)

    def _died(self) -> Failure:
        for rank in self._ranks:
            if rank.failure is not None and not self._gone:
                return self._named(rank, rank.failure)
        rank = (self._gone or self._ended_early())[0]
        code = rank.process.exit_code(EXIT_S)
        if code is None and not self._is_alone:
            message = f"the process ended, or was cut off, during {rank.stage}"
            return self._named(rank, Failure(kind="crashed", message=message, phase=rank.stage))
        return self._named(rank, crash(code, rank.stage, rank.process.last_lines()))

    def _hung(self, what: str) -> Failure:
        """Failure by a hang. A rank that waits for others is not its cause, so the ranks' whereabouts are compared."""
        if self._is_alone:
            (rank,) = self._ranks
            return Failure(kind="timeout", message=what, phase=rank.stage, last_lines=rank.process.last_lines())
        self._send_all("where")
        deadline_s = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline_s and not all(rank.where for rank in self._open.values()):
            self._receive_some()
        guilty = self._to_blame()
        lines = tuple(f"rank {rank.number} {standing(rank.where)}" for rank in self._ranks)
        if len(guilty) != 1:
            where = "; ".join(lines[:2]) + ("; …" if len(lines) > 2 else "")
            stage = (guilty or self._ranks)[0].stage
            return Failure(kind="timeout", message=f"the ranks {what}: {where}", phase=stage, last_lines=lines)
        (rank,) = guilty
        message = f"{what}: it {standing(rank.where)} during {rank.stage}, and the others wait for it"
        return self._named(rank, Failure(kind="timeout", message=message, phase=rank.stage, last_lines=lines))

    def _to_blame(self) -> list[_Rank]:
        silent = [rank for rank in self._ranks if rank.where is None and not rank.has_ended]
        code, device = (
            [rank for rank in self._ranks if rank.where and rank.where.state == state] for state in ("code", "device")
        )
        return silent or code or device

    def _named(self, rank: _Rank, failure: Failure) -> Failure:
        return failure if self._is_alone else named(failure, rank.number, socket.gethostname())


def standing(where: messages.Whereabouts | None) -> str:
    if where is None:
        return "does not answer"
    doing = {"collective": "waits for other ranks", "device": "waits for its device"}.get(where.state, "is")
    return f"{doing} at {where.line}"


def is_suffered(failure: Failure) -> bool:
    """True if a failure only reports another rank's loss."""
    return failure.kind in ("error", "timeout") and any(word in failure.message for word in _LOST_CONNECTION)
