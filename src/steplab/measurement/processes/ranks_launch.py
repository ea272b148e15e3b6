"""Measures in several processes: starts them, or joins those that torchrun started, and listens to every one.

On this machine alone they are started here, each with a connection that it inherits, and they meet in a private folder:
nothing listens on a port. If torchrun has started a command line for each rank, the first one listens to the ranks of
all.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import psutil  # type: ignore[import-untyped]

from steplab.errors import UserError
from steplab.measurement.machine.torchrun import LOOPBACK, ProcessPlace, Torchrun
from steplab.measurement.processes.hearing import Hearing
from steplab.measurement.processes.hub import Hub
from steplab.measurement.processes.listener import Listener
from steplab.measurement.processes.messages import JointOutcome, Order, Request
from steplab.measurement.processes.scratch import scratch_folder
from steplab.measurement.processes.started import Started
from steplab.records.failure import Failure
from steplab.units import MIB, format_bytes

_EXIT_S = 10.0
"""How long processes may take to end after the verdict."""
_PROCESS_BYTES = 128 * MIB
"""The memory of a process that has only loaded torch."""


def converse_with_ranks(
    request: Request, listener: Listener, timeout_s: float | None, around: Torchrun | None
) -> Failure | None:
    """Have several processes serve `request`, pass the first one's messages to `listener`, and return their failure.

    Returns None if the first rank sent its last message. Raises the SteplabError that a rank reported, and UserError if
    torchrun started another number of processes than the request needs. KeyboardInterrupt ends all processes and passes
    on.
    """
    if around is not None and around.size != request.processes:
        raise UserError(
            f"torchrun started {around.size} processes, but the layout takes "
            f"{request.processes}: give it --nproc-per-node and --nnodes for {request.processes} in all"
        )
    if around is None:
        refuse_too_many(request.processes)
    with _started(request, around) as (hub, processes):
        hearing = Hearing(hub, request, listener, timeout_s, processes)
        with nullcontext() if around is None else _told_to_end(hearing.end_soon):
            failure = hearing.hear()
        refusal = listener.refusal
        refused = (refusal.exit_code, str(refusal)) if refusal is not None else None
        hub.broadcast("verdict", JointOutcome(failure=failure, refused=refused))
        if failure is None and refusal is None:
            deadline_s = time.monotonic() + _EXIT_S
            for process in processes.values():
                process.exit_code(wait_s=max(0.0, deadline_s - time.monotonic()))
    if refusal is not None:
        raise refusal
    return failure


def refuse_too_many(processes: int) -> None:
    """Raise UserError if the processes would not fit into the free memory with torch alone loaded.

    A machine that swaps needs minutes to fail, and cannot be used meanwhile.
    """
    available = psutil.virtual_memory().available
    if processes * _PROCESS_BYTES > available:
        raise UserError(
            f"{processes} processes do not fit: each takes at least {format_bytes(_PROCESS_BYTES)}, and "
            f"{format_bytes(available)} of memory are free; start at most {available // _PROCESS_BYTES}"
        )


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


@contextmanager
def _started(request: Request, around: Torchrun | None) -> Iterator[tuple[Hub, dict[int, Started]]]:
    """The hub and the processes started here: all ranks or, under torchrun, the first. All are ended on leaving."""
    hub, processes, order = Hub(request.processes), dict[int, Started](), Order(request=request)
    with scratch_folder() as scratch:
        try:
            if around is None:
                size, order.folder = request.processes, str(scratch.path)
                places = [ProcessPlace(rank=rank, size=size, local_rank=rank, local_size=size) for rank in range(size)]
            else:
                order.hub = (hub.listen(everywhere=not around.is_on_one_machine), hub.token)
                places = [around]
            for place in places:
                with hub.adopt(place.rank) as connection:
                    words = [sys.executable, "-m", "steplab.measurement.entry.rank", str(connection.fileno())]
                    inherited = [connection.fileno(), scratch.lock]
                    processes[place.rank] = Started(words, order, environment_of(place), inherited)
            yield hub, processes
        finally:
            hub.close()
            for process in processes.values():
                process.end()


def environment_of(place: ProcessPlace) -> dict[str, str]:
    """The environment variables of a rank's process: its place and, if all ranks are on this machine, loopback for its
    sockets.

    gloo and NCCL would otherwise listen on an interface that other machines reach, and neither authenticates who
    connects.
    """
    environment = dict(os.environ)
    if not isinstance(place, Torchrun):
        # one core per rank: torch would give each rank all cores
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // place.size)))
    if not isinstance(place, Torchrun) or place.is_on_one_machine:
        interface = _loopback_interface()
        if interface is not None:
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
            environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": not a prefix
        environment.setdefault("NCCL_RAS_ENABLE", "0")
    return environment | place.variables()


def _loopback_interface() -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return str(name)
    return None
