"""Requests to the reading process, and its answers: JSON, one per line."""

from msgspec import Raw, Struct

NO_MEMORY = 77
"""Exit code of a process that was refused memory; an answer might need some."""


class Request(Struct):
    what: str
    options: dict[str, str | int | None]
    memory_bytes: int
    processor_s: int


class Told(Struct, tag=True):
    done_bytes: int
    size_bytes: int


class Read(Struct, tag=True):
    result: Raw


class NotRead(Struct, tag=True):
    """The error line for an unreadable file."""

    message: str
    exit_code: int
    """Exit code of the SteplabError; 2: choose another file."""


class Broken(Struct, tag=True):
    traceback: str


Answer = Told | Read | NotRead | Broken
