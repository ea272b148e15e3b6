"""A process's connection to the hub that listens to all of them (`hub`)."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from steplab.measurement.processes.messages import (
    BadMessage,
    Hello,
    JointOutcome,
    Message,
    Order,
    Whereabouts,
    decoded,
    lines_of,
    read,
)
from steplab.records.codec import encode
from steplab.records.turns import Turn

_CONNECT_S = 60.0
_RETRY_S = 0.05
_WELCOME_BYTES = 1024
_ORDERS = {"order": Order, "turn": Turn}


class Channel:
    """Sends messages to the hub from any thread and, once `listen` is called, receives orders from it."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(None)
        self._stream = self._socket.makefile("rb")
        self._lines = lines_of(self._stream)
        self._lock = threading.Lock()

    def send(self, kind: str, value: Any = None) -> None:
        """Send one message. If the hub is gone, the listening thread ends the process."""
        with contextlib.suppress(OSError):
            self._write({"kind": kind, "value": value})

    def receive(self) -> Message | None:
        """The next message; None if the hub is gone. Raises BadMessage for what is no message."""
        try:
            line = next(self._lines, None)
        except OSError:
            return None
        return None if line is None else decoded(line, Message)

    def listen(
        self,
        on_end: Callable[[str], None],
        *,
        on_order: Callable[[Order | Turn], None] = lambda order: None,
        on_verdict: Callable[[JointOutcome], None] = lambda verdict: None,
    ) -> None:
        """Answer questions in a thread from now on; call back on an order, on the verdict over all ranks, or with the
        reason when the hub is gone."""

        def serve() -> None:
            try:
                while message := self.receive():
                    if message.kind == "where":
                        self.send("where", whereabouts())
                    elif message.kind in _ORDERS:
                        on_order(decoded(message.value, _ORDERS[message.kind]))
                    elif message.kind == "verdict":
                        on_verdict(read(message.value, JointOutcome))
                on_end("the connection to the first process ended")
            except BadMessage as error:
                on_end(f"the first process sent an unreadable message: {error}")

        threading.Thread(target=serve, daemon=True).start()

    def close(self) -> None:
        """End the connection; not while another thread listens."""
        self._stream.close()
        self._socket.close()

    def _write(self, message: object) -> None:
        with self._lock:
            self._socket.sendall(encode(message) + b"\n")


def connect(address: str, port: int, token: str, rank: int) -> Channel:
    """A channel to a hub over TCP. Raises OSError if the hub does not answer within _CONNECT_S.

    With many connections the hub closes those that have not proven themselves; the rank then tries again.
    """
    deadline_s = time.monotonic() + _CONNECT_S
    hello = encode(Hello(token=token, rank=rank, host=socket.gethostname())) + b"\n"
    while (left_s := deadline_s - time.monotonic()) > 0:
        connected = socket.create_connection((address, port), timeout=left_s)
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connected.sendall(hello)
            if _is_welcomed(connected, deadline_s):
                return Channel(connected)
        connected.close()
        time.sleep(_RETRY_S)
    raise TimeoutError(f"the first process does not answer at {address} port {port}")


def _is_welcomed(connected: socket.socket, deadline_s: float) -> bool:
    """Whether it is the hub that answers. Raises OSError if it says nothing in time."""
    line = b""
    while len(line) < _WELCOME_BYTES and not line.endswith(b"\n"):
        connected.settimeout(max(_RETRY_S, deadline_s - time.monotonic()))
        received = connected.recv(1)  # no more than the line: what follows is the channel's
        if not received:
            return False
        line += received
    try:
        return bool(decoded(line, Message).kind == "welcome")
    except BadMessage:
        return False


def whereabouts() -> Whereabouts:
    """Where the main thread of this process stands."""
    identity = threading.main_thread().ident
    frame = sys._current_frames().get(identity) if identity is not None else None
    state: str | None = None
    while frame is not None:
        path = frame.f_code.co_filename.replace(os.sep, "/")
        state = state or _state(path, frame.f_code.co_name)
        if _is_told(path):
            return Whereabouts(state=state or "code", line=_place(frame))
        frame = frame.f_back
    return Whereabouts(state=state or "code", line="a line that is not known")


def _state(path: str, function: str) -> str | None:
    """What a frame reveals of everything that it called; None if nothing."""
    if "/torch/distributed/" in path or "/steplab/parallel/" in path:
        return "collective"
    if "/torch/" in path and function == "synchronize":
        return "device"
    return "code" if _is_told(path) else None


def _is_told(path: str) -> bool:
    """Whether a line of that file means something to the reader of the message."""
    libraries = ("<", os.path.dirname(os.__file__) + "/")
    return not path.startswith(libraries) and "/torch/" not in path and "/steplab/parallel/" not in path


def _place(frame: FrameType) -> str:
    path = "/".join(frame.f_code.co_filename.split(os.sep)[-2:])
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
