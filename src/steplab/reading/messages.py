"""What the process that reads a file is asked, and what it answers: JSON, an answer a line."""

from msgspec import Raw, Struct

NO_MEMORY = 77
"""The exit code of a process that was refused memory; an answer might need some."""


class Request(Struct):
    """What to read; the paths of the files follow as they are, for JSON has no place for a name that is no UTF-8."""

    what: str
    """The name of a function in `child`."""
    options: dict[str, str | int | None]
    memory_bytes: int
    processor_s: int


class Told(Struct, tag=True):
    """Progress."""

    done_bytes: int
    size_bytes: int


class Read(Struct, tag=True):
    """The result, of the function's own type."""

    result: Raw


class NotRead(Struct, tag=True):
    """The line for the user, if the file cannot be read."""

    message: str
    exit_code: int
    """That of the SteplabError; 2: another file is to be named."""


class Broken(Struct, tag=True):
    """The traceback of an error that steplab should not have."""

    traceback: str


Answer = Told | Read | NotRead | Broken
