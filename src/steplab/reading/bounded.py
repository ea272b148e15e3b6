"""Reads a trace or a memory snapshot of anyone's in a process of its own.

A file can make its reader take any amount of memory or time: by size, by nesting, by keys that collide, by a query
without end. Counters in a reader never meet all of that; the operating system does. It refuses the process more memory
than `Limits.memory_bytes`, ends it after `Limits.processor_s`, and Ctrl-C ends it even where C code is deaf to signals.

The answer is JSON, decoded as the type that is expected, so that no code of the process runs here.
"""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from steplab.errors import SteplabError, UserError
from steplab.limits import LimitReached, Limits
from steplab.python import python_running
from steplab.reading.messages import NO_MEMORY, Answer, Broken, NotRead, Read, Request, Told
from steplab.units import format_bytes
from steplab.unpacking import OnProgress, unwatched

_Result = TypeVar("_Result")


def read_bounded(
    what: str,
    result: type[_Result],
    paths: Sequence[Path],
    options: dict[str, str | int | None] | None = None,
    limits: Limits | None = None,
    on_progress: OnProgress = unwatched,
) -> _Result:
    """What a new process reads of the files, the first of which names what goes wrong.

    `what` is a function of `child`, which gets the paths and `options`; `on_progress` is called with the bytes read and
    the file's size. Raises UserError for a file that cannot be read, is not of its kind or takes more than the limits
    allow (None: the usual ones), and SteplabError as the function does.
    """
    limits = limits or Limits()
    if paths[0].exists() and not (paths[0].is_file() or paths[0].is_dir()):
        fix = "write it to a file and name that (.gz and .xz are read as they are)"
        raise UserError(f"{paths[0]} is no regular file, and another process is to read it; {fix}")
    request = msgspec.json.encode(Request(what, options or {}, limits.memory_bytes, limits.processor_s))
    answer: Answer | None = None
    command = python_running("steplab.reading.child", request.decode(), *map(str, paths))
    pipe = subprocess.PIPE
    # a session of its own: Ctrl-C reaches this process alone
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
        except msgspec.ValidationError as error:  # NaN, which JSON has not
            raise UserError(f"{paths[0]}: a value in it cannot be right: {error}") from error
    if isinstance(answer, NotRead):
        raise (UserError if answer.exit_code == UserError.exit_code else SteplabError)(answer.message)
    if isinstance(answer, Broken):
        raise RuntimeError(f"in the process that read {paths[0]}:\n{answer.traceback}")
    raise UserError(f"{paths[0]}: {_why_ended(code, limits)}")


def _why_ended(code: int, limits: Limits) -> str:
    if code == NO_MEMORY:
        return str(LimitReached(f"reading it takes more than {format_bytes(limits.memory_bytes)} of memory"))
    if code == -getattr(signal, "SIGXCPU", 0):
        return str(LimitReached(f"reading it takes more than {limits.processor_s} s of processor time"))
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process that read it ended by {how}: it is damaged, or nests too deep"
