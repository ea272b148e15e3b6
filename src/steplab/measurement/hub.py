"""Where the processes of one measurement report to the one that started it: a socket with a connection for each.

Messages are lines of JSON, `{"kind": ..., "value": ...}`. The first one of a connection says who speaks and proves by a
token that it was asked to. The other way go few: the request, and questions. A connection that ends says that its
process has: nothing has to be polled for that, on one machine or on many.
"""

import contextlib
import secrets
import selectors
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from steplab.records.codec import encode

LAUNCHER = -1
"""The rank of the process that starts the others."""


def command_line_of(rank: int) -> int:
    """The rank that the command line of a rank goes by, where torchrun started one for each; and back."""
    return LAUNCHER - 1 - rank


GONE = "gone"
"""The kind of the event that a connection has ended."""
_NULL = msgspec.Raw(b"null")
_READ_BYTES = 1 << 16
_MOST_UNPROVEN_BYTES = 1 << 12


class Hello(msgspec.Struct):
    """Who speaks."""

    token: str
    rank: int
    host: str
    pid: int


class Message(msgspec.Struct):
    """One line."""

    kind: str
    value: msgspec.Raw = _NULL


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A message, or the end of a connection, and whose."""

    rank: int
    kind: str
    value: msgspec.Raw


class _Connection:
    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.hello: Hello | None = None
        self.received = bytearray()


class Hub:
    """Listens on a port of its own; to be used by one thread, and closed."""

    def __init__(self, *, everywhere: bool) -> None:
        """`everywhere`: other machines may connect too. They need the token."""
        self.token = secrets.token_hex(16)
        dual = everywhere and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        address = ("", 0) if everywhere else ("127.0.0.1", 0)
        self._server = socket.create_server(address, family=family, dualstack_ipv6=dual, backlog=1024)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self.ranks: dict[int, Hello] = {}
        """Who has said hello, by rank."""
        self._connections: dict[int, _Connection] = {}

    def poll(self, timeout_s: float) -> Iterator[Event]:
        """What has come, after waiting for it so long at most."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.data is None:
                self._accept()
            else:
                yield from self._read(key.data)

    def send(self, rank: int, kind: str, value: object = None) -> None:
        """To one rank; one that is gone does not hear it."""
        connection = self._connections.get(rank)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.socket.sendall(encode({"kind": kind, "value": value}) + b"\n")

    def broadcast(self, kind: str, value: object = None) -> None:
        """To all ranks."""
        for rank in list(self._connections):
            self.send(rank, kind, value)

    def is_connected(self, rank: int) -> bool:
        """Whether a rank has come and has not gone."""
        return rank in self._connections

    def close(self) -> None:
        """End all connections: the ranks end when they see that."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it may be gone already
            peer, _ = self._server.accept()
            peer.settimeout(10.0)  # of sends: a process that does not read must not stop the one that listens to all
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._selector.register(peer, selectors.EVENT_READ, _Connection(peer))

    def _read(self, connection: _Connection) -> Iterator[Event]:
        try:
            received = connection.socket.recv(_READ_BYTES)
        except OSError:
            received = b""
        connection.received += received
        *lines, rest = connection.received.split(b"\n")
        connection.received = bytearray(rest)
        for line in lines:
            if connection.hello is None:
                connection.hello = self._admit(line, connection)
                if connection.hello is None:
                    self._drop(connection)
                    return
                yield Event(rank=connection.hello.rank, kind="hello", value=_NULL)
            else:
                message = msgspec.json.decode(line, type=Message)
                yield Event(rank=connection.hello.rank, kind=message.kind, value=message.value)
        if not received or (connection.hello is None and len(rest) > _MOST_UNPROVEN_BYTES):
            self._drop(connection)
            if connection.hello is not None:
                del self._connections[connection.hello.rank]
                yield Event(rank=connection.hello.rank, kind=GONE, value=_NULL)

    def _admit(self, line: bytes | bytearray, connection: _Connection) -> Hello | None:
        try:
            hello = msgspec.json.decode(line, type=Hello)
        except msgspec.DecodeError:
            return None
        if not secrets.compare_digest(hello.token.encode(), self.token.encode()) or hello.rank in self.ranks:
            return None
        self.ranks[hello.rank] = hello
        self._connections[hello.rank] = connection
        return hello

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
