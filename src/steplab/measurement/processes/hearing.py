"""What is known of each of the measuring processes, which of them failed, and why.

A failure of one rank ends the measurement of all: at once if the rank raises, runs out of memory or dies; after STALL_S
without progress on any rank, or at the user's time limit, if it hangs. A single process that hangs is ended at the time
limit alone.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from steplab.measurement.processes.hub import GONE, UNREAD, Event, Hub, command_line_of
from steplab.measurement.processes.listener import Listener
from steplab.measurement.processes.messages import STAGE, BadMessage, Whereabouts, read
from steplab.measurement.processes.started import crash, named, unreadable
from steplab.records.failure import Failure
from steplab.units import format_time

STALL_S = 600.0
"""How long all ranks may go without progress: compiling a large model reports nothing for minutes."""
_POLL_S = 0.2
_CAUSE_S = 5.0
"""How long after the first sign of trouble the hearing waits for another rank to name the cause."""
_COMMAND_LINE_S = 1.0
"""How long torchrun may take to end the command line of a rank that it started."""
_ANSWER_S = 3.0
"""How long a rank may take to say where it stands."""
EXIT_S = 10.0
"""How long processes may take to end once they have said all."""
_LOST_CONNECTION = ("gloo", "NCCL", "DistBackendError", "DistNetworkError", "DistStoreError", "Connection closed")
"""Words in the error of a rank that fails because another rank is gone."""


class RankProcess(Protocol):
    """The process of a rank that was started here."""

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """The exit code, after waiting for at most `wait_s`; negative for a signal, None if the process still runs."""

    def last_lines(self) -> tuple[str, ...]:
        """The last lines of what it wrote to its standard streams."""


@dataclass(kw_only=True, slots=True)
class _Rank:
    stage: str = "starting"
    failure: Failure | None = None
    ended: bool = False
    where: Whereabouts | None = None


class Hearing:
    """What is known of each rank so far."""

    def __init__(
        self,
        hub: Hub,
        num_ranks: int,
        listener: Listener,
        timeout_s: float | None,
        processes: Mapping[int, RankProcess],
        exit_s: float = EXIT_S,
    ) -> None:
        """Listen through `hub`; `processes` are those of the ranks started here: all, or under torchrun the first
        alone. `exit_s` is how long one may take to end whose connection has ended."""
        self._hub, self._listener, self._processes = hub, listener, processes
        self._exit_s = exit_s
        self._ranks = {number: _Rank() for number in range(num_ranks)}
        self._is_alone = num_ranks == 1
        self._pending = deque[Event]()
        """Events after one with which a process waits for its turn."""
        self._gone: list[int] = []
        """The ranks that ended without reporting the end of their work, in order."""
        self._is_to_end = False
        self.limit(timeout_s)
        listener.renew = self._renew

    def limit(self, timeout_s: float | None) -> None:
        """Give the processes so much time from now on; None: any time."""
        self._timeout_s = timeout_s
        self._renew()

    def end_soon(self) -> None:
        """From now on wait only long enough to hear of a cause."""
        self._is_to_end = True

    def hear(self) -> Failure | None:
        """Listen to all ranks until the first has sent its last message, or waits for a turn, or one has failed."""
        self._listener.is_ready = False
        self._listener.on_progress(self._listener.progress)
        trouble_s: float | None = None
        while not self._listener.answered:
            if not self._pending:
                self._pending.extend(self._hub.poll(_POLL_S))
            while self._pending and not self._listener.is_ready:
                self._take(self._pending.popleft())
            if self._listener.is_ready:
                return None
            failed = self._failed_rank()
            if failed is not None:
                return self._told(failed)
            now_s = time.monotonic()
            if not self._is_troubled():
                trouble_s = None  # a process ended before its last message was read
            elif trouble_s is None:
                trouble_s = now_s
            if any(number in self._processes for number in self._gone):
                return self._died()
            if trouble_s is not None and now_s - trouble_s > self._cause_s:
                return self._died()
            if self._timeout_s is not None and now_s - self._started_s > self._timeout_s:
                return self._hung(f"did not end within {format_time(self._timeout_s)}")
            if not self._is_alone and now_s - self._moved_s > STALL_S:
                return self._hung(f"made no progress for {format_time(STALL_S)}")
        return None

    @property
    def _cause_s(self) -> float:
        return _CAUSE_S if len(self._processes) == len(self._ranks) else _COMMAND_LINE_S

    def _renew(self) -> None:
        self._started_s = self._moved_s = time.monotonic()

    def _take(self, event: Event) -> None:
        try:
            self._understand(event)
        except BadMessage as error:
            self._understand(Event(rank=event.rank, kind=UNREAD, why=str(error)))

    def _understand(self, event: Event) -> None:
        number = event.rank if event.rank >= 0 else command_line_of(event.rank)
        rank = self._ranks[number]
        if event.kind == UNREAD:
            process = self._processes.get(event.rank)
            rank.failure = unreadable(event.why, rank.stage, process.last_lines() if process else ())
        elif event.kind == "failed" and not self._is_alone:
            rank.failure = read(event.value, Failure)
        elif event.rank < 0:
            return
        elif event.kind == GONE:
            if not rank.ended:
                self._gone.append(number)
        elif event.kind == "where":
            rank.where = read(event.value, Whereabouts)
        elif event.kind == "ended":
            rank.ended = True
        else:
            self._moved_s = time.monotonic()
            if event.kind == "stage":
                rank.stage = read(event.value, STAGE)[0]
            if number == 0 or event.kind == "refused":
                self._listener.hear(event.kind, event.value)

    def _failed_rank(self) -> int | None:
        """The rank with a failure that is the cause and not a consequence."""
        for number, rank in self._ranks.items():
            if rank.failure is not None and not _is_suffered(rank.failure):
                return number
        return None

    def _ended_early(self) -> list[int]:
        """The ranks whose processes ended before their last message; the first rank sends that of all."""
        return [
            number
            for number, process in self._processes.items()
            if process.exit_code() is not None and (number == 0 or not self._ranks[number].ended)
        ]

    def _is_troubled(self) -> bool:
        has_failed = any(rank.failure for rank in self._ranks.values())
        return bool(self._gone or self._ended_early()) or self._is_to_end or has_failed

    def _died(self) -> Failure:
        """The failure of a rank that ended without a message; others may have lost their connection to it."""
        # A rank that was started here has an exit code.
        for number in sorted(self._gone, key=lambda number: number not in self._processes):
            return self._crashed(number)
        for number, rank in self._ranks.items():
            if rank.failure is not None:
                return self._told(number)
        if self._is_to_end:
            stage = self._listener.progress.stage
            return Failure(kind="crashed", message=f"torchrun ended all processes during {stage}", phase=stage)
        return self._crashed(self._ended_early()[0])

    def _crashed(self, number: int) -> Failure:
        stage, process = self._ranks[number].stage, self._processes.get(number)
        code = process.exit_code(self._exit_s) if process else None
        if process is None or (code is None and not self._is_alone):
            message = f"the process ended, or was cut off, during {stage}"
            failure = Failure(kind="crashed", message=message, phase=stage)
        else:
            failure = crash(code, stage, process.last_lines())
        return self._named(number, failure)

    def _told(self, number: int) -> Failure:
        failure = self._ranks[number].failure
        assert failure is not None
        return self._named(number, failure)

    def _hung(self, what: str) -> Failure:
        """The failure of ranks that hang: each is asked where it stands, and one that waits for others is not the
        cause. A single one is not asked."""
        if self._is_alone:
            process, stage = self._processes[0], self._ranks[0].stage
            return Failure(kind="timeout", message=what, phase=stage, last_lines=process.last_lines())
        for number in self._ranks:
            self._hub.send(number, "where")
        deadline_s = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline_s and not all(
            rank.where or not self._hub.is_connected(number) for number, rank in self._ranks.items()
        ):
            for event in self._hub.poll(_POLL_S):
                self._take(event)
        absent = [number for number in self._ranks if number not in self._hub.hosts]
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
        """The ranks that do not answer; else those that wait for nothing; else those that do not wait for another
        rank."""
        silent = [number for number, rank in self._ranks.items() if rank.where is None and not rank.ended]
        of_state = {
            state: [number for number, rank in self._ranks.items() if rank.where and rank.where.state == state]
            for state in ("code", "device")
        }
        return silent or of_state["code"] or of_state["device"]

    def _standing(self, number: int, *, alone: bool = False) -> str:
        where = self._ranks[number].where
        name = "it" if alone else f"rank {number}"
        if number not in self._hub.hosts:
            return f"{name} never joined"
        if where is None:
            return f"{name} does not answer"
        doing = {"collective": "waits for other ranks", "device": "waits for its device"}.get(where.state, "is")
        return f"{name} {doing} at {where.line}"

    def _named(self, number: int, failure: Failure) -> Failure:
        return failure if self._is_alone else named(failure, number, self._hub.hosts.get(number))


def _is_suffered(failure: Failure) -> bool:
    """Whether the failure only says that another rank is gone."""
    return failure.kind in ("error", "timeout") and any(word in failure.message for word in _LOST_CONNECTION)
