"""What is known of each of several processes that measure together, and which of them failed, and of what.

Whatever happens to one rank ends the run for all: what raises or runs out of memory, at once; what dies, in a few
seconds; what hangs, after STALL_S without progress on any rank, or at the end of the time the user gave.
"""

import contextlib
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from steplab.measurement.channel import Whereabouts
from steplab.measurement.child import Request
from steplab.measurement.hub import GONE, LAUNCHER, Event, Hub, command_line_of
from steplab.measurement.processes import crash, named, tail
from steplab.records.run import Failure
from steplab.units import format_time

if TYPE_CHECKING:
    from steplab.measurement.launch import Listener

STALL_S = 600.0
"""How long all ranks may go without progress: compiling a large model is one long silence."""
_POLL_S = 0.2
_CAUSE_S = 5.0
"""How long after a first sign of trouble its cause is waited for: an exit code, or what another rank has to say."""
_ANSWER_S = 3.0
"""How long a rank may take to say where it stands."""
_LOST_CONNECTION = ("gloo", "NCCL", "DistBackendError", "DistNetworkError", "DistStoreError", "Connection closed")
"""In the error of a rank that suffers from another's end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logs:
    """What the processes wrote to their standard streams."""

    folder: Path
    errors: IO[bytes]
    """Of the child."""

    def of(self, number: int) -> tuple[str, ...]:
        """The last lines that a rank wrote."""
        for path in self.folder.glob(f"*/attempt_0/{number}/stderr.log"):
            with path.open("rb") as written:
                return tail(written)
        return ()


@dataclass(kw_only=True, slots=True)
class _Rank:
    stage: str = "starting"
    failure: Failure | None = None
    ended: bool = False
    gone: bool = False
    where: Whereabouts | None = None


class Hearing:
    """What is known of each rank so far."""

    def __init__(
        self,
        hub: Hub,
        request: Request,
        listener: "Listener",
        timeout_s: float | None,
        child: subprocess.Popen[bytes],
        logs: Logs,
        *,
        is_joined: bool,
    ) -> None:
        self._hub, self._request, self._listener = hub, request, listener
        self._timeout_s = timeout_s
        self._child, self._logs, self._is_joined = child, logs, is_joined
        self._ranks = {number: _Rank() for number in range(request.processes)}
        self._exits: dict[int, int] | None = None
        self._is_to_end = False
        self._started_s = self._moved_s = time.monotonic()
        listener.renew = self._renew

    def end_soon(self) -> None:
        """Wait no longer than to hear of a cause."""
        self._is_to_end = True

    def hear(self) -> Failure | None:
        """Hear all ranks until the first has said its last word, or one has failed."""
        self._listener.on_progress(self._listener.progress)
        trouble_s: float | None = None
        while not self._listener.answered:
            child_ended = self._child.poll() is not None
            for event in self._hub.poll(_POLL_S):
                self._take(event)
            failed = self._failed_rank()
            if failed is not None:
                return self._told(failed)
            now_s = time.monotonic()
            if trouble_s is None and self._is_troubled(child_ended):
                trouble_s = now_s
            if trouble_s is not None and (self._exits is not None or now_s - trouble_s > self._cause_s):
                return self._died()
            if self._timeout_s is not None and now_s - self._started_s > self._timeout_s:
                return self._hung(f"did not end within {format_time(self._timeout_s)}")
            if now_s - self._moved_s > STALL_S:
                return self._hung(f"made no progress for {format_time(STALL_S)}")
        return None

    @property
    def _cause_s(self) -> float:
        return 1.0 if self._is_joined else _CAUSE_S  # no launcher of ours tells exit codes

    def _renew(self) -> None:
        self._started_s = self._moved_s = time.monotonic()

    def _take(self, event: Event) -> None:
        if event.rank == LAUNCHER:
            if event.kind == "exits":
                self._exits = msgspec.json.decode(event.value, type=dict[int, int])
            elif event.kind == "refused":
                self._listener.hear(event.kind, event.value)
            return
        if event.rank < LAUNCHER:
            if event.kind == "failed":
                self._ranks[command_line_of(event.rank)].failure = msgspec.json.decode(event.value, type=Failure)
            return
        rank = self._ranks[event.rank]
        if event.kind == GONE:
            rank.gone = not rank.ended
        elif event.kind == "hello":
            if not self._is_joined:
                self._hub.send(event.rank, "request", self._request)
        elif event.kind == "failed":
            rank.failure = msgspec.json.decode(event.value, type=Failure)
        elif event.kind == "where":
            rank.where = msgspec.json.decode(event.value, type=Whereabouts)
        elif event.kind == "ended":
            rank.ended = True
        else:
            self._moved_s = time.monotonic()
            if event.kind == "stage":
                rank.stage = msgspec.json.decode(event.value, type=tuple[str, int])[0]
            if event.rank == 0 or event.kind == "refused":
                self._listener.hear(event.kind, event.value)

    def _failed_rank(self) -> int | None:
        """The rank that said what went wrong, if that was its own doing."""
        for number, rank in self._ranks.items():
            if rank.failure is not None and not _is_suffered(rank.failure):
                return number
        return None

    def _is_troubled(self, child_ended: bool) -> bool:
        return child_ended or self._is_to_end or any(rank.gone or rank.failure for rank in self._ranks.values())

    def _died(self) -> Failure:
        """Some rank ended without a word; others may have been ended for that, or have lost their connection to it."""
        exits = self._exits or {}
        gone = [number for number, rank in self._ranks.items() if rank.gone]
        gone += [number for number in exits if number not in gone]  # its end is told, and not seen yet
        gone.sort(key=lambda number: exits.get(number) == -signal.SIGTERM)  # which is how the launcher ends the others
        if gone:
            return self._crashed(gone[0], exits.get(gone[0]))
        for number, rank in self._ranks.items():
            if rank.failure is not None:
                return self._told(number)
        if self._is_to_end:
            stage = self._listener.progress.stage
            return Failure(kind="crashed", message=f"torchrun ended all processes during {stage}", phase=stage)
        return crash(self._child.wait(), self._listener.progress.stage, tail(self._logs.errors))

    def _crashed(self, number: int, code: int | None) -> Failure:
        stage = self._ranks[number].stage
        if code is None and self._is_joined and number == 0:  # this process's own child
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._child.wait(timeout=_ANSWER_S)
        if code is None:
            message = f"the process ended, or was cut off, during {stage}"
            failure = Failure(kind="crashed", message=message, phase=stage)
        else:
            failure = crash(code, stage, self._logs.of(number))
        return self._named(number, failure)

    def _told(self, number: int) -> Failure:
        failure = self._ranks[number].failure
        assert failure is not None
        return self._named(number, failure)

    def _hung(self, what: str) -> Failure:
        """Ask every rank where it stands: one that waits for others is not the one that hangs."""
        for number in self._ranks:
            self._hub.send(number, "where")
        deadline_s = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline_s and not all(
            rank.where or not self._hub.is_connected(number) for number, rank in self._ranks.items()
        ):
            for event in self._hub.poll(_POLL_S):
                self._take(event)
        absent = [number for number in self._ranks if number not in self._hub.ranks]
        guilty = absent or self._to_blame()
        lines = tuple(self._standing(number) for number in self._ranks)
        stage = self._ranks[guilty[0] if guilty else 0].stage
        if len(guilty) != 1:
            where = "; ".join(lines[:2]) + ("; …" if len(lines) > 2 else "")
            return Failure(kind="timeout", message=f"the ranks {what}: {where}", phase=stage, last_lines=lines)
        number = guilty[0]
        message = f"{what}: {self._standing(number, alone=True)} in {stage}, and the others wait for it"
        return self._named(number, Failure(kind="timeout", message=message, phase=stage, last_lines=lines))

    def _to_blame(self) -> list[int]:
        """The ranks that do not answer; else those that wait for nothing; else those that wait for no other rank."""
        silent = [number for number, rank in self._ranks.items() if rank.where is None]
        of_state = {
            state: [number for number, rank in self._ranks.items() if rank.where and rank.where.state == state]
            for state in ("code", "device")
        }
        return silent or of_state["code"] or of_state["device"]

    def _standing(self, number: int, *, alone: bool = False) -> str:
        where = self._ranks[number].where
        name = "it" if alone else f"rank {number}"
        if number not in self._hub.ranks:
            return f"{name} never joined"
        if where is None:
            return f"{name} does not answer"
        doing = {"collective": "waits for other ranks", "device": "waits for its device"}.get(where.state, "is")
        return f"{name} {doing} at {where.line}"

    def _named(self, number: int, failure: Failure) -> Failure:
        hello = self._hub.ranks.get(number)
        return named(failure, number, hello.host if hello else None)


def _is_suffered(failure: Failure) -> bool:
    """Whether it says no more than that another rank is no longer there."""
    return failure.kind == "error" and any(word in failure.message for word in _LOST_CONNECTION)
