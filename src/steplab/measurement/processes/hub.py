"""The place where all processes of one measurement report to the process that started them, each over a connection.

A process that was started here has inherited its connection. Processes that torchrun started connect over TCP, and
their first line proves by a token that they belong here. Until then the connection may be a stranger's: anything else
that arrives on it closes that connection alone. Questions, and the verdict over all ranks, travel in the other
direction. The end of a connection tells that its process has ended, on this machine or another, so that nothing has to
be polled.
"""

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from steplab.measurement.machine.torchrun import LOOPBACK
from steplab.measurement.processes.messages import BadMessage, Hello, Message, decoded, refuse_too_long
from steplab.records.codec import encode

GONE = "gone"
"""The kind of the event that a connection has ended."""
UNREAD = "unread"
"""The kind of the event that a rank has sent what is no message."""
_READ_BYTES = 1 << 16
_MOST_ACCEPTED = 1024
"""The number of connections that are accepted before the existing ones are read again."""
_MOST_UNPROVEN = 64
_MOST_UNPROVEN_BYTES = 1 << 12
_UNPROVEN_S = 5.0
"""How long a connection may take to prove itself."""
_SEND_S = 10.0
"""How long a send may take: a process that does not read must not block the hub."""


def command_line_of(rank: int) -> int:
    """The number of the command line of a rank, where torchrun started one for each; and back."""
    return -1 - rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A message or the end of a connection, with its rank."""

    rank: int
    kind: str
    value: msgspec.Raw = field(default_factory=msgspec.Raw)
    """The message's value; empty where the kind says everything."""
    why: str = ""
    """What is wrong with an unreadable message."""


class _Connection:
    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.rank: int | None = None
        """The rank of the connection; None until it has proven itself."""
        self.received = bytearray()
        self.since_s = time.monotonic()

    def read(self) -> list[bytearray] | None:
        """The lines that have arrived; None if the connection has ended. Does not wait.

        Raises BadMessage for a line that is too long.
        """
        try:
            received = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received:
            return None
        self.received += received
        if b"\n" not in received:
            refuse_too_long(len(self.received))
            return []
        *lines, self.received = self.received.split(b"\n")
        return lines


class Hub:
    """Listens to ranks. To be used by one thread, and closed."""

    def __init__(self, size: int) -> None:
        """`size` is the number of all ranks."""
        self.token = secrets.token_hex(16)
        self.hosts: dict[int, str] = {}
        """The machine of each rank, or command line, that has connected."""
        self._size = size
        self._selector = selectors.DefaultSelector()
        self._server: socket.socket | None = None
        self._connections: dict[int, _Connection] = {}
        self._unproven: dict[_Connection, None] = {}
        """The connections that have not proven themselves, oldest first."""

    def adopt(self, rank: int) -> socket.socket:
        """Make the connection of a rank on this machine; returns the end that its process inherits, to be closed
        here."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = _Connection(ours)
        self._selector.register(ours, selectors.EVENT_READ, connection)
        self._prove(connection, rank, socket.gethostname())
        return theirs

    def listen(self, *, everywhere: bool) -> int:
        """Accept connections that have the token, from other machines too if `everywhere`; returns the port."""
        dual = everywhere and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        address = ("" if everywhere else LOOPBACK, 0)
        self._server = socket.create_server(address, family=family, dualstack_ipv6=dual, backlog=4096)
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, None)
        return int(self._server.getsockname()[1])

    def poll(self, timeout_s: float) -> Iterator[Event]:
        """The events that have arrived, after waiting for at most `timeout_s`."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.data is None:
                yield from self._accept()
            elif key.data.rank is not None:
                yield from self._hear(key.data)
            elif key.data in self._unproven:  # not dropped since
                yield from self._examine(key.data)
        while self._unproven:
            oldest = next(iter(self._unproven))
            if time.monotonic() - oldest.since_s < _UNPROVEN_S:
                break
            self._drop(oldest)

    def send(self, rank: int, kind: str, value: object = None) -> None:
        """Send to one rank. A rank that is gone does not receive it."""
        connection = self._connections.get(rank)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.socket.settimeout(_SEND_S)
                connection.socket.sendall(encode({"kind": kind, "value": value}) + b"\n")
            connection.socket.setblocking(False)

    def broadcast(self, kind: str, value: object = None) -> None:
        """Send to all ranks."""
        for rank in list(self._connections):
            self.send(rank, kind, value)

    def is_connected(self, rank: int) -> bool:
        """Whether a rank has connected and has not gone."""
        return rank in self._connections

    def close(self) -> None:
        """End all connections; the ranks then end."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self) -> Iterator[Event]:
        """Accept all waiting connections, and read from each at once: one that proves itself now is safe from later
        ones."""
        assert self._server is not None
        for _ in range(_MOST_ACCEPTED):
            try:
                peer, _ = self._server.accept()
            except OSError:  # nobody waits, or the one who did is gone
                return
            peer.setblocking(False)
            connection = _Connection(peer)
            self._selector.register(peer, selectors.EVENT_READ, connection)
            self._unproven[connection] = None
            yield from self._examine(connection)
            if len(self._unproven) > _MOST_UNPROVEN:
                oldest = next(iter(self._unproven))
                yield from self._examine(oldest)  # it may have proven itself by now
                if oldest in self._unproven:
                    self._drop(oldest)

    def _examine(self, connection: _Connection) -> Iterator[Event]:
        """Handle what an unproven connection sent; it is closed unless that is a hello or may become one."""
        lines = connection.read()
        if lines:
            hello = self._admitted(lines[0])
            if hello is not None:
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                del self._unproven[connection]
                self._prove(connection, hello.rank, hello.host)
                self.send(hello.rank, "welcome")
                for line in lines[1:]:
                    yield self._event(hello.rank, line)
                return
        if lines is None or lines or len(connection.received) > _MOST_UNPROVEN_BYTES:
            self._drop(connection)

    def _admitted(self, line: bytearray) -> Hello | None:
        try:
            hello = decoded(line, Hello)
            is_known = secrets.compare_digest(hello.token.encode(), self.token.encode())
        except Exception:  # whatever a stranger sends ends that connection and nothing else
            return None
        rank = hello.rank if hello.rank >= 0 else command_line_of(hello.rank)
        return hello if is_known and rank < self._size and hello.rank not in self.hosts else None

    def _prove(self, connection: _Connection, rank: int, host: str) -> None:
        connection.rank = rank
        self.hosts[rank] = host
        self._connections[rank] = connection

    def _hear(self, connection: _Connection) -> Iterator[Event]:
        assert connection.rank is not None
        try:
            lines = connection.read()
        except BadMessage as error:
            self._end(connection)
            yield Event(rank=connection.rank, kind=UNREAD, why=str(error))
            return
        if lines is None:
            self._end(connection)
            yield Event(rank=connection.rank, kind=GONE)
        for line in lines or ():
            yield self._event(connection.rank, line)

    def _event(self, rank: int, line: bytearray) -> Event:
        try:
            message = decoded(line, Message)
        except BadMessage as error:
            return Event(rank=rank, kind=UNREAD, why=str(error))
        return Event(rank=rank, kind=message.kind, value=message.value)

    def _end(self, connection: _Connection) -> None:
        assert connection.rank is not None
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self._connections[connection.rank]

    def _drop(self, connection: _Connection) -> None:
        del self._unproven[connection]
        self._selector.unregister(connection.socket)
        connection.socket.close()
