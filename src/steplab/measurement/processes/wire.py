"""Messages of JSON over `multiprocessing.connection`, between a process and those that measure for it.

A message is `{"kind": ..., "value": ...}`; a measuring process first receives its request. It may run a user's code, so
`receive` and `read` raise BadMessage for unknown messages, and no message is unpickled.
"""

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated, Any, Literal

import msgspec

from steplab.printing import remark
from steplab.records.codec import encode
from steplab.records.validation import cleaned, first_problem
from steplab.units import MIB, format_bytes

MOST_BYTES = 256 * MIB
"""Largest message, for a record of ten million samples."""
_PATIENCE_S = 10
_NULL = msgspec.Raw(b"null")

Kind = Literal[
    "stage", "step", "environment", "measured", "ready", "facts", "at", "cell", "result", "failed", "refused", "ended",
    "request", "turn", "where",
]  # fmt: skip

STAGE = tuple[Annotated[str, msgspec.Meta(max_length=1000)], int]


class BadMessage(Exception):
    def __init__(self, why: str) -> None:
        super().__init__(remark(why))  # it may quote the message


class Message(msgspec.Struct):
    kind: Kind
    value: msgspec.Raw = _NULL


class Request(msgspec.Struct, kw_only=True):
    job: str
    task: msgspec.Raw
    device: str = "auto"
    """Device of several processes: auto, cuda or cpu; a single process's task names it."""
    processes: int = 1
    folder: str | None = None
    """Private folder where several processes meet; None for a single one, and under torchrun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    state: str
    """`collective` if it waits for other ranks, `device` if it waits for its device, else `code`."""
    line: str
    """Innermost line of code outside torch and the standard library."""


class Wire:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, kind: Kind, value: object = None) -> None:
        """Send a message; does nothing if the other process is gone."""
        text = encode({"kind": kind, "value": value})
        with self._lock, contextlib.suppress(OSError):
            self.connection.send_bytes(text)

    def receive(self) -> Message | None:
        """Receive a message; None if the other process is gone. Raises BadMessage if unreadable."""
        try:
            text = self.connection.recv_bytes(MOST_BYTES)
        except BlockingIOError:
            raise BadMessage(f"it breaks off for {_PATIENCE_S} s") from None
        except (EOFError, OSError):
            if not self.connection.readable:
                raise BadMessage(f"it has more than {format_bytes(MOST_BYTES)}") from None
            return None
        message: Message = decoded(text, Message)
        return message


def wire_to_a_child() -> tuple[Wire, Connection]:
    """A wire and its other end, to be inherited by a process. It never waits forever within a message."""
    ours, theirs = socket.socketpair()
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _PATIENCE_S, 0))
    return Wire(Connection(ours.detach())), Connection(theirs.detach())


def decoded(text: bytes | msgspec.Raw, type: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error


def read(text: bytes | msgspec.Raw, type: Any) -> Any:
    """Decode a value. Texts get one line without control characters; impossible numbers raise BadMessage."""
    value = cleaned(decoded(text, type))
    problem = first_problem(value)
    if problem is not None:
        raise BadMessage(problem)
    return value
