import errno
import functools
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

from steplab.cli.app import app, main

LIMIT_S = 30.0
"""Processor seconds after which a command counts as hanging."""
_WAITS_S = 120.0
"""Seconds after which an idle command counts as hanging."""
_IDLE_S = 0.1
"""Processor seconds in as many seconds that count as none; low priority gets more on a busy machine."""
_CODES = (0, 1, 2, 3, 4)
_LONGEST_LINE = 2000
_WARNING = re.compile(r"\w+Warning: .*")
_ALLOWED = "\n\t"
_STEERING = ("Cc", "Cf", "Zl", "Zp", "Cs")
"""Unicode categories that steer a terminal or page: controls, direction marks, line breaks."""
_HARMLESS_FORMAT = "\u00ad\u200b\u200c\u200d\u2060\ufeff"
"""Characters of category Cf that only join or separate letters."""


class TooLong(BaseException):
    pass


@dataclass(frozen=True, kw_only=True)
class End:
    code: int
    stdout: str
    stderr: str
    seconds: float
    faults: tuple[str, ...]


class NotStarted(subprocess.Popen[bytes]):
    def __init__(self, command: Sequence[Any], **options: Any) -> None:
        if any("steplab.reading" in str(word) for word in command):
            super().__init__(command, **options)
            return
        self.returncode, self._child_created = None, False  # what its end looks at
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def run(
    *arguments: str,
    stdin: bytes = b"",
    limit_s: float = LIMIT_S,
    parse_once: bool = False,
    process: type[subprocess.Popen[bytes]] = NotStarted,
) -> End:
    """Run one command in this process and judge its end.

    `parse_once`: the same arguments recur with other files, so parsing is not under test. `process` plays measuring; by
    default no process can start.
    """
    began_s = time.process_time()
    out, err = _stream(), _stream()
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    faults = list[str]()
    code = -1
    with (
        mock.patch.multiple(sys, stdout=out, stderr=err, stdin=given),
        mock.patch("subprocess.Popen", process),
        mock.patch("steplab.cli.app.app", _call_again if parse_once else app),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # as Python does in a program
        warnings.showwarning = _show
        try:
            with _limited(limit_s):
                code = main(list(arguments))
        except TooLong:
            faults.append(f"computed for more than {limit_s:.0f} s, or waited for {_WAITS_S:.0f} s")
        except BaseException as error:
            faults.append(f"{type(error).__name__} escaped: {error}"[:300])
    stdout, stderr = _text(out), _text(err)
    faults += judged(code, stdout, stderr)
    return End(code=code, stdout=stdout, stderr=stderr, seconds=time.process_time() - began_s, faults=tuple(faults))


def run_apart(*arguments: str, limit_s: float, most_bytes: int) -> End:
    words = [sys.executable, "-m", "steplab", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # The shell's limit ends what hangs; the limits of this process hold too.
        limited = ["sh", "-c", f'ulimit -t {limit_s:.0f}; exec "$@"', "sh", *words]
        process = subprocess.Popen(limited, stdout=out, stderr=err)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "surrogateescape"))
    seconds, peak_bytes = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
    faults = list(judged(process.returncode, *texts))
    if peak_bytes > most_bytes:
        faults.append(f"took {peak_bytes >> 20} MiB of memory, more than {most_bytes >> 20}")
    return End(code=process.returncode, stdout=texts[0], stderr=texts[1], seconds=seconds, faults=tuple(faults))


def judged(code: int, stdout: str, stderr: str) -> Iterator[str]:
    lines = stderr.splitlines()
    if "not enough memory" in stderr:
        yield "took more memory than there is"
    if code not in (*_CODES, -1):
        yield f"exit code {code}"
    yield from (line[:300] for line in lines if "internal error" in line or line.startswith("Traceback"))
    yield from (found[0][:300] for found in _WARNING.finditer(stderr))
    told = (
        lines if code == 1 else [line for line in lines if line.startswith("steplab: ")]
    )  # a cell that failed has a row
    if code in (1, 2) and not told:
        yield f"exit code {code} without a line that says why"
    if any(len(line) > _LONGEST_LINE for line in lines):
        yield f"a line of {max(map(len, lines))} characters on standard error"
    for name, text in (("standard output", stdout), ("standard error", stderr)):
        if found := steering(text):
            yield f"{name} has the control character {found!a}"


def steering(text: str) -> str | None:
    if text.translate(_NO_BREAKS).isprintable():
        return None
    for character in text:
        if character not in _ALLOWED + _HARMLESS_FORMAT and unicodedata.category(character) in _STEERING:
            return character
    return None


_NO_BREAKS = {ord(character): None for character in _ALLOWED + _HARMLESS_FORMAT}


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    buffer = stream.detach()
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8", "surrogateescape")


def _call_again(arguments: Sequence[str], **options: Any) -> Any:
    command, parsed = _parsed(tuple(arguments))
    return command(*parsed.args, **parsed.kwargs)


@functools.cache
def _parsed(arguments: tuple[str, ...]) -> tuple[Callable[..., Any], Any]:
    command, parsed, _ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
    return command, parsed


def _show(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    print(f"{category.__name__}: {message}", file=sys.stderr)


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    used_s = time.process_time()

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise TooLong

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal used_s
        before_s, used_s = used_s, time.process_time()
        if used_s - before_s < _IDLE_S:
            raise TooLong

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, end, limit_s), (signal.ITIMER_REAL, signal.SIGALRM, look, _WAITS_S))
    before = {number: signal.signal(number, handler) for _, number, handler, _ in timers}
    try:
        for timer, _, _, seconds in timers:
            signal.setitimer(timer, seconds, seconds)
        yield
    finally:
        for timer, number, _, _ in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def described(arguments: Sequence[str]) -> str:
    return " ".join(ascii(argument) if not argument.isprintable() or " " in argument else argument[:80]
                    for argument in arguments)  # fmt: skip
