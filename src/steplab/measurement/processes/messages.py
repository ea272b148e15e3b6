"""The messages between processes that measure and the process that started them, as lines of JSON.

A line is a Message, `{"kind": ..., "value": ...}`. The first line of a connection over TCP is a Hello, and the first
message to a process that was started is its Order.

A process may be a user's, or have been disturbed by one: what is heard of it passes `lines_of` and `read`, which refuse
by BadMessage what no process of steplab says.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Annotated, Any, Literal

import msgspec

from steplab.printing import remark
from steplab.records.failure import Failure
from steplab.records.validation import cleaned, first_problem
from steplab.units import MIB, format_bytes

MOST_BYTES = 256 * MIB
"""Bytes of the longest message: a record of ten million samples."""
_NULL = msgspec.Raw(b"null")
_MEETING = re.compile(r"([0-9]{1,5}):([0-9a-f]{32})")

Kind = Literal[
    "stage", "step", "environment", "measured", "ready", "facts", "at", "cell", "result", "hub", "failed", "refused",
    "ended", "order", "turn", "where", "welcome", "verdict",
]  # fmt: skip


STAGE = tuple[Annotated[str, msgspec.Meta(max_length=1000)], int]
"""The type of a stage's name, which progress shows, and of its number of steps."""


class BadMessage(Exception):
    """A process sent what is no message; the text says what was wrong with it."""

    def __init__(self, why: str) -> None:
        super().__init__(remark(why))  # it may quote the message


class Message(msgspec.Struct):
    """One line of a connection."""

    kind: Kind
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
    """What a process is started for."""

    request: Request
    folder: str | None = None
    """The private folder in which the ranks of one command line meet; None for a single process, and if torchrun's
    variables say where."""
    hub: tuple[int, str] | None = None
    """Port and token at which this command line listens to the ranks of others, if torchrun started one for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JointOutcome:
    """The outcome of all ranks, which each rank tells its own command line; both fields None if all succeeded."""

    failure: Failure | None = None
    refused: tuple[int, str] | None = None
    """Exit code and text of the refusal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """Where a process stands when it is asked."""

    state: str
    """`collective` if it waits for other ranks, `device` if it waits for its device, else `code`."""
    line: str
    """The innermost line of code outside of torch and Python's library."""


def lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The whole lines of a stream, until it ends or its sender has died in the middle of one.

    Raises BadMessage for a line that is too long.
    """
    while (line := stream.readline(MOST_BYTES + 1)).endswith(b"\n"):
        yield line
    refuse_too_long(len(line))


def refuse_too_long(num_bytes: int) -> None:
    """Raise BadMessage if so many bytes of a line are more than a message has."""
    if num_bytes > MOST_BYTES:
        raise BadMessage(f"it has more than {format_bytes(MOST_BYTES)}")


def decoded(text: bytes | bytearray | msgspec.Raw, type: Any) -> Any:
    """A line, or the value of a message, as this type. Raises BadMessage if it is not of the type."""
    try:
        return msgspec.json.decode(text, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from error


def read(text: bytes | bytearray | msgspec.Raw, type: Any) -> Any:
    """The same for values of records: their texts are cleaned, and BadMessage refuses numbers that cannot be right."""
    value = cleaned(decoded(text, type))
    problem = first_problem(value)
    if problem is not None:
        raise BadMessage(problem)
    return value


def hub_at(text: bytes) -> tuple[int, str]:
    """Port and token of the hub, from the text at the meeting place. Raises BadMessage if it is another text."""
    found = _MEETING.fullmatch(text.decode("ascii", "replace"))
    if found is None:
        raise BadMessage(f"{text[:64]!r} at the meeting place is no port and token")
    return int(found[1]), found[2]
