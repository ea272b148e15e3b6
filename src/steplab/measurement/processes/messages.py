"""The messages between processes that measure and the process that started them, as lines of JSON.

A line is a Message, `{"kind": ..., "value": ...}`. The first line of a connection over TCP is a Hello, and the line on
standard input of a process that was started is a Request or an Order.
"""

import msgspec

from steplab.records.failure import Failure

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of decoding a line that is not the message it should be."""
_NULL = msgspec.Raw(b"null")


class Message(msgspec.Struct):
    """One line of a connection."""

    kind: str
    value: msgspec.Raw = _NULL


class Hello(msgspec.Struct):
    """The first line of a rank that connects over TCP: its number, and the proof that it belongs here."""

    token: str
    rank: int
    host: str


class Request(msgspec.Struct, kw_only=True):
    """The measurement that the parent asks for."""

    job: str
    """The name of the job, one of jobs.JOBS."""
    task: msgspec.Raw
    """The job's task, of the job's own type."""
    device: str = "auto"
    """The device of several processes: auto, cuda or cpu; a single process finds it in its task."""
    processes: int = 1
    """The number of processes that do this together."""


class Order(msgspec.Struct):
    """The order that a rank's process finds on its standard input."""

    request: Request
    folder: str | None = None
    """The private folder in which the ranks of one command line meet; None if torchrun's variables say where."""
    hub: tuple[int, str] | None = None
    """Port and token at which this command line listens to the ranks of others, if torchrun started one for each."""


class Verdict(msgspec.Struct):
    """The outcome of all ranks, which each rank tells its own command line; both fields None if all succeeded."""

    failure: Failure | None = None
    refused: tuple[int, str] | None = None
    """Exit code and text of the refusal."""


class Whereabouts(msgspec.Struct):
    """Where a process stands when it is asked."""

    state: str
    """`collective` if it waits for other ranks, `device` if it waits for its device, else `code`."""
    line: str
    """The innermost line of code outside of torch and Python's library."""
