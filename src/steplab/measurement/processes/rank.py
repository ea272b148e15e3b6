"""A request that this process serves itself, as one of torchrun's ranks.

A thread does the work, so that the main one can react to signals and the time limit. torchrun ends all ranks once one
fails. A failing rank leaves its failure in the common store, for ranks that only lose their connection to it.
"""

import atexit
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import msgspec

from steplab.measurement.machine.torchrun import Torchrun, keep_to_loopback
from steplab.measurement.processes.child import keep_compiled_code_private, remove_what_was_cut_off, whereabouts, work
from steplab.measurement.processes.conversation import EXIT_S, STALL_S, Listener, is_suffered, standing
from steplab.measurement.processes.started import named, unreadable
from steplab.measurement.processes.wire import BadMessage, Message, Request, read
from steplab.records.codec import encode
from steplab.records.failure import Failure
from steplab.units import format_time

_CAUSE_S = 2.0
_LOOK_S = 0.1
_KEY = "failure"


class Rank:
    def __init__(self, request: Request, listener: Listener, timeout_s: float | None, around: Torchrun) -> None:
        self._request, self._listener, self._timeout_s, self._around = request, listener, timeout_s, around
        self._said = SimpleQueue[tuple[Any, Any]]()
        self._store: Any = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def serve(self) -> Failure | None:
        """Do the job on this rank; returns a failure. Raises a refusal's SteplabError."""
        remove_what_was_cut_off(keep_compiled_code_private())
        if self._around.is_on_one_machine:
            keep_to_loopback(os.environ)
        listener = self._listener
        listener.on_progress(listener.progress)
        with _prints_on_stderr(), self._told_to_end():
            self._thread.start()
            code = 1
            try:
                failure = self._receive()
                self._thread.join(_CAUSE_S if failure else EXIT_S)
            except KeyboardInterrupt:
                code = 128 + signal.SIGINT
                raise
            finally:
                if self._thread.is_alive():
                    atexit.register(_exit_at_once, code)
        if listener.refusal is not None:
            raise listener.refusal
        return failure

    def _work(self) -> None:
        def meet() -> Any:
            from steplab.measurement.machine.world import meeting_place

            self._store = meeting_place(self._around)
            return self._store

        def send(kind: Any, value: Any) -> None:
            if kind == "failed" and self._store is not None and not is_suffered(value):
                with suppress(RuntimeError):  # torch's, if the store is gone
                    self._store.set(_KEY, encode(self._named(value)))
            self._said.put((kind, value))

        try:
            work(self._request, send, self._around, meet)
        finally:
            self._said.put(("ended", None))  # whatever happened: `_receive` waits no longer

    def _receive(self) -> Failure | None:
        listener = self._listener
        started_s = moved_s = time.monotonic()

        def renew() -> None:
            nonlocal started_s
            started_s = time.monotonic()

        listener.renew = renew
        while True:
            until_s = moved_s + STALL_S
            if self._timeout_s is not None:
                until_s = min(until_s, started_s + self._timeout_s)
            try:
                kind, value = self._said.get(timeout=max(0.0, until_s - time.monotonic()))
            except Empty:
                return self._hung(time.monotonic() - moved_s >= STALL_S)
            moved_s = time.monotonic()
            match kind:
                case "ended":
                    return None
                case "failed":
                    if not is_suffered(value):
                        return self._named(value)
                    lost = f"another rank ended during {value.phase}: {value.message}"
                    return self._cause() or self._named(dataclasses.replace(value, kind="crashed", message=lost))
                case "told to end":
                    stage = listener.progress.stage
                    told = Failure(kind="crashed", message=f"torchrun ended all processes during {stage}", phase=stage)
                    return self._cause() or self._named(told)
            try:
                listener.receive(Message(kind=kind, value=msgspec.Raw(encode(value))))
            except BadMessage as error:
                return self._named(unreadable(error, listener.progress.stage))
            if listener.refusal is not None:
                return None

    def _hung(self, has_stalled: bool) -> Failure:
        limit_s = STALL_S if has_stalled or self._timeout_s is None else self._timeout_s
        what = "made no progress for" if has_stalled else "did not end within"
        stage = self._listener.progress.stage
        message = f"{what} {format_time(limit_s)}: it {standing(whereabouts(self._thread))} during {stage}"
        return self._named(Failure(kind="timeout", message=message, phase=stage))

    def _named(self, failure: Failure) -> Failure:
        return named(failure, self._around.rank, socket.gethostname())

    def _cause(self) -> Failure | None:
        found = list[Failure]()

        def look() -> None:
            with suppress(RuntimeError, BadMessage):  # torch's store raises RuntimeErrors
                until_s = time.monotonic() + _CAUSE_S
                while not self._store.check([_KEY]):  # its own wait would print a warning
                    if time.monotonic() > until_s:
                        return
                    time.sleep(_LOOK_S)
                found.append(read(self._store.get(_KEY), Failure))

        if self._store is not None:
            looking = threading.Thread(target=look, daemon=True)  # the work may wait for the store, and hold it
            looking.start()
            looking.join(2 * _CAUSE_S)
        return found[0] if found else None

    @contextmanager
    def _told_to_end(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self._said.put(("told to end", None)))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _prints_on_stderr() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _exit_at_once(code: int) -> NoReturn:
    """Exit at once while work waits for other ranks: an orderly exit may crash or hang."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
