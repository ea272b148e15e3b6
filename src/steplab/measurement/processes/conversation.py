"""The measuring processes of one request: started with it, heard until they have answered, ended with all that they
started.

On this machine alone each process inherits its connection, and several meet in a private folder: nothing listens on a
port. If torchrun has started a command line for each rank, the first one listens to the ranks of all.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from steplab.measurement.machine.torchrun import ProcessPlace, Torchrun
from steplab.measurement.processes.hearing import EXIT_S, Hearing
from steplab.measurement.processes.hub import Hub
from steplab.measurement.processes.listener import Listener
from steplab.measurement.processes.messages import JointOutcome, Order, Request
from steplab.measurement.processes.ranks import environment_of
from steplab.measurement.processes.scratch import scratch_folder
from steplab.measurement.processes.started import Started
from steplab.python import python_running
from steplab.records.failure import Failure
from steplab.records.turns import Turn

_WRAPPER_EXIT_S = 600.0
"""How long the profiler around a process may take to write what it recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """Where a process runs and what it imports."""

    folder: Path | None = None
    """Its working folder, from which it imports a user's model; None: this process's."""
    environment: Mapping[str, str] | None = None
    """All of its environment variables; None: this process's."""


HERE = Surroundings()
"""The surroundings of this process."""
CHILD = "steplab.measurement.entry.child"
"""The program of a measuring process."""


class Conversation:
    """The processes of a request and their messages; a context manager that ends the processes."""

    def __init__(
        self,
        request: Request | None,
        listener: Listener,
        timeout_s: float | None,
        *,
        around: Torchrun | None = None,
        wrapper: Sequence[str] = (),
        surroundings: Surroundings = HERE,
        ahead_of: str | None = None,
    ) -> None:
        """Start the processes. `timeout_s` limits each time that this process waits for them.

        Under torchrun (`around`) only the process of this command line's rank is started. `wrapper` and `surroundings`
        are of a single process. Without a request it loads what the job `ahead_of` needs, and is then ready for
        `begin`.

        Raises SteplabError if the system does not let one start.
        """
        hears_all = around is None or around.is_first
        size = request.processes if request is not None and hears_all else 1
        self._listener, self._around = listener, around if hears_all else None
        self._exit_s = _WRAPPER_EXIT_S if wrapper else EXIT_S
        self._processes: dict[int, Started] = {}
        with ExitStack() as opened:
            scratch = opened.enter_context(scratch_folder()) if size > 1 and around is None else None
            opened.callback(self._end_processes)
            self._hub = opened.enter_context(closing(Hub(size)))
            for number, environment in enumerate(_environments(size, around, surroundings)):
                with self._hub.adopt(number) as connection:
                    descriptor = connection.fileno()
                    self._processes[number] = Started(
                        [*wrapper, *python_running(CHILD, str(descriptor), *([ahead_of] if ahead_of else []))],
                        folder=surroundings.folder,
                        environment=environment,
                        pass_fds=[descriptor, *([scratch.lock] if scratch else [])],
                    )
            if request is not None:
                order = Order(request=request, folder=str(scratch.path) if scratch else None)
                if self._around is not None:
                    order.hub = (self._hub.listen(everywhere=not self._around.is_on_one_machine), self._hub.token)
                self._hub.broadcast("order", order)
            self._opened = opened.pop_all()
        self._hearing = Hearing(self._hub, size, listener, timeout_s, self._processes, self._exit_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def listen(self) -> Failure | None:
        """Hear the processes until the last message, or until a single one waits for a turn; gives their failure.

        Raises the SteplabError that a process reported.
        """
        with nullcontext() if self._around is None else _told_to_end(self._hearing.end_soon):
            failure = self._hearing.hear()
        listener = self._listener
        if failure is None and listener.is_ready:
            return None
        refusal = listener.refusal
        refused = (refusal.exit_code, str(refusal)) if refusal is not None else None
        self._hub.broadcast("verdict", JointOutcome(failure=failure, refused=refused))
        if refusal is not None:
            raise refusal
        if failure is None and listener.failed is None:
            deadline_s = time.monotonic() + self._exit_s
            for process in self._processes.values():
                process.exit_code(wait_s=max(0.0, deadline_s - time.monotonic()))
        return failure

    def begin(self, request: Request, timeout_s: float | None) -> None:
        """Give a process that was started without one its request, and its time limit."""
        self._hearing.limit(timeout_s)
        self._hub.send(0, "order", Order(request=request))

    def give(self, turn: Turn) -> Failure | None:
        """Give the process its next turn, and listen as `listen` does until the turn is over."""
        self._listener.renew()
        self._hub.send(0, "turn", turn)
        return self.listen()

    def end(self) -> None:
        """End the processes and everything that they started."""
        self._opened.close()

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.end()


def _environments(size: int, around: Torchrun | None, surroundings: Surroundings) -> Sequence[Mapping[str, str] | None]:
    """The environment variables of each process to start."""
    if around is not None:
        return [environment_of(around)]
    if size == 1:
        return [surroundings.environment]
    places = (ProcessPlace(rank=rank, size=size, local_rank=rank, local_size=size) for rank in range(size))
    return [environment_of(place) for place in places]


@contextmanager
def _told_to_end(end_soon: Callable[[], None]) -> Iterator[None]:
    """A context in which torchrun's signal to end calls `end_soon`: torchrun ends all command lines once one fails,
    and the first still has to name the rank."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: end_soon())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
