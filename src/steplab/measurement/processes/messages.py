"""The messages between processes that measure and the process that started them, as lines of JSON.

A line is a Message, `{"kind": ..., "value": ...}`. The first line of a connection over TCP is a Hello, and the line on
standard input of a process that was started is a Request or an Order.
"""

import msgspec

from steplab.records.failure import Failure

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a line raises when it is not the message it should be."""
_NULL = msgspec.Raw(b"null")


class Message(msgspec.Struct):
    """A line of a connection."""

    kind: str
    value: msgspec.Raw = _NULL


class Hello(msgspec.Struct):
    """The first line of a rank that connects over TCP: who speaks, and the proof that it was asked to."""

    token: str
    rank: int
    host: str


class Request(msgspec.Struct, kw_only=True):
    """What the parent wants measured."""

    job: str
    """Name of the job, one of jobs.JOBS."""
    task: msgspec.Raw
    """What the job is to do, of the job's own type."""
    device: str = "auto"
    """Where several processes compute: auto, cuda or cpu; a process by itself finds that in its task."""
    processes: int = 1
    """How many are to do this together."""


class Order(msgspec.Struct):
    """What a rank's process finds on its standard input."""

    request: Request
    folder: str | None = None
    """The private folder in which the ranks of one command line meet; None: torchrun's variables say where."""
    hub: tuple[int, str] | None = None
    """Port and token at which this command line hears the ranks of others, where torchrun started one for each."""


class Verdict(msgspec.Struct):
    """What became of all ranks, for each to tell its own command line; neither: all went well."""

    failure: Failure | None = None
    refused: tuple[int, str] | None = None
    """Exit code and text."""


class Whereabouts(msgspec.Struct):
    """Where a process stands when it is asked."""

    state: str
    """`collective`: it waits for other ranks; `device`: it waits for its device; `code`: neither."""
    line: str
    """The innermost line that is not torch's or Python's own."""
