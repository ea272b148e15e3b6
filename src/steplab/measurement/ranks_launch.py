"""Measure in several processes: start them, or join those that torchrun started, and hear every one.

On this machine alone they are started by torch's elastic launcher, itself this process's one child (elastic.py). Where
torchrun has started a command line for each rank, the first one hears the ranks of all.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

from steplab.errors import UserError
from steplab.measurement import elastic
from steplab.measurement.child import Request
from steplab.measurement.hearing import Hearing, Logs
from steplab.measurement.hub import LAUNCHER, Hub
from steplab.measurement.processes import end
from steplab.measurement.rank import Order, Verdict
from steplab.measurement.torchrun import Torchrun
from steplab.records.codec import encode
from steplab.records.run import Failure
from steplab.units import MIB, format_bytes

if TYPE_CHECKING:
    from steplab.measurement.launch import Listener

_EXIT_S = 10.0
"""How long processes may take to end once all is said."""
_PROCESS_BYTES = 128 * MIB
"""Memory of a process's own that has done no more than load torch."""


def converse_with_ranks(
    request: Request, listener: "Listener", timeout_s: float | None, around: Torchrun | None
) -> Failure | None:
    """Have `request` done by several processes, `listener` hear the first, and give what became of them.

    None: the first said its last word. Raises the SteplabError that a rank named; UserError where torchrun started
    another number of processes than the request takes. KeyboardInterrupt ends all processes and passes on.
    """
    if around is not None and around.size != request.processes:
        raise UserError(
            f"torchrun started {around.size} processes and the layout takes "
            f"{request.processes}: give it --nproc-per-node and --nnodes for {request.processes} in all"
        )
    if around is None:
        refuse_too_many(request.processes)
    with _started(request, around) as (hub, child, logs):
        hearing = Hearing(hub, request, listener, timeout_s, child, logs, is_joined=around is not None)
        with _told_to_end(hearing.end_soon) if around is not None else nullcontext():
            failure = hearing.hear()
        refusal = listener.refusal
        refused = (refusal.exit_code, str(refusal)) if refusal is not None else None
        hub.broadcast("verdict", Verdict(failure=failure, refused=refused))
        if failure is None and refusal is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_EXIT_S)
    if refusal is not None:
        raise refusal
    return failure


def refuse_too_many(processes: int) -> None:
    """Raise UserError where torch alone, loaded by each, is more than the memory that is free.

    A machine that swaps takes minutes to find that out, and is of no use to anybody meanwhile.
    """
    available = psutil.virtual_memory().available
    if processes * _PROCESS_BYTES > available:
        raise UserError(
            f"{processes} processes do not fit: each takes {format_bytes(_PROCESS_BYTES)} at the least, and "
            f"{format_bytes(available)} of memory are free: {available // _PROCESS_BYTES} at the very most"
        )


@contextmanager
def _told_to_end(end_soon: Callable[[], None]) -> Iterator[None]:
    """torchrun ends all command lines as soon as one of them ends badly: time enough to say which rank that was."""
    if threading.current_thread() is not threading.main_thread():  # no other can hear of signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: end_soon())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _started(request: Request, around: Torchrun | None) -> Iterator[tuple[Hub, subprocess.Popen[bytes], "Logs"]]:
    """The hub, and the child that brings ranks to it; in the end none of them is left."""
    with tempfile.TemporaryDirectory(prefix="steplab-") as folder, tempfile.TemporaryFile() as errors:
        hub = Hub(everywhere=around is not None)
        if around is None:
            module, words = "steplab.measurement.elastic", []
            device = request.step.device if request.step else request.device
            order: object = elastic.Order(
                processes=request.processes, device=device, port=hub.port, token=hub.token, logs=folder
            )
        else:
            module, words = "steplab.measurement.rank", ["1"]  # nobody reads what it tells its own command line
            order = Order(request=request, port=hub.port, token=hub.token)
        child = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its exit is what gets reported
                child.stdin.write(encode(order) + b"\n")
                child.stdin.flush()
            yield hub, child, Logs(folder=Path(folder), errors=errors)
        finally:
            hub.close()
            if around is None:
                _kill_ranks(hub)
            end(child)


def _kill_ranks(hub: Hub) -> None:
    """Each leads a session of its own. They end by themselves as the hub does, unless they can do nothing at all."""
    for number, hello in hub.ranks.items():
        if number != LAUNCHER:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(hello.pid, signal.SIGKILL)
