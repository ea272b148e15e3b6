"""Read any trace or memory snapshot in a separate, bounded process.

A file can demand unlimited memory or time: by size, nesting, colliding keys, or an endless query. Counters in a reader
do not stop all of these. So the operating system caps memory at `limits.READER_BYTES` and ends the process after
`limits.READER_S`. Ctrl-C works even in C code. Requests and answers are JSON, one per line; an answer has the expected
type, so no code of the process runs here.
"""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

from steplab import limits
from steplab.errors import SteplabError, UserError
from steplab.python import python_running
from steplab.units import format_bytes
from steplab.unpacking import OnProgress, unwatched

NO_MEMORY = 77
"""Exit code of a process without enough memory; writing an answer might need some."""


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
    message: str
    exit_code: int
    """Exit code of the command; 2: choose another file."""


class Broken(Struct, tag=True):
    traceback: str


Answer = Told | Read | NotRead | Broken


_Result = TypeVar("_Result")


def read_bounded(
    what: str,
    result: type[_Result],
    paths: Sequence[Path],
    options: dict[str, str | int | None] | None = None,
    on_progress: OnProgress = unwatched,
) -> _Result:
    """Read files in a bounded process and return the decoded result.

    `what` names a function of `child`, called with the paths and `options`; errors name the first file. `on_progress`
    gets bytes read and the file's size. Raises UserError if the file is unreadable, of another kind or exceeds a limit,
    and SteplabError as the function does.
    """
    if paths[0].exists() and not (paths[0].is_file() or paths[0].is_dir()):
        fix = "save it to a file first (.gz and .xz are fine)"
        raise UserError(f"{paths[0]} is not a regular file; {fix}")
    request = msgspec.json.encode(Request(what, options or {}, limits.READER_BYTES, limits.READER_S))
    answer: Answer | None = None
    command = python_running("steplab.reading.child", request.decode(), *map(str, paths))
    pipe = subprocess.PIPE
    # Its own session: Ctrl-C reaches only this process.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                answer = msgspec.json.decode(line, type=Answer)
                if isinstance(answer, Told):
                    on_progress(answer.done_bytes, answer.size_bytes)
            code = process.wait()
        finally:
            process.kill()
    if isinstance(answer, Read):
        try:
            return msgspec.json.decode(answer.result, type=result)
        except msgspec.ValidationError as error:  # NaN is not JSON
            raise UserError(f"{paths[0]}: it has an invalid value: {error}") from error
    if isinstance(answer, NotRead):
        raise (UserError if answer.exit_code == UserError.exit_code else SteplabError)(answer.message)
    if isinstance(answer, Broken):
        raise RuntimeError(f"in the process that read {paths[0]}:\n{answer.traceback}")
    raise UserError(f"{paths[0]}: {_why_ended(code)}")


def _why_ended(code: int) -> str:
    if code == NO_MEMORY:
        return f"reading it takes more than {format_bytes(limits.READER_BYTES)} of memory"
    if code == -signal.SIGXCPU:
        return f"reading it takes more than {limits.READER_S} s of processor time"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"its reader ended by {how}: it is damaged, or nests too deep"
