"""Entry point of the process that reads one file within limits, then ends."""

import fcntl
import gc
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from steplab.errors import SteplabError
from steplab.reading.bounded import NO_MEMORY, Answer, Broken, NotRead, Read, Request, Told
from steplab.unpacking import OnProgress

_TELL_S = 0.1


def profile(on_progress: OnProgress, trace: Path, *, source: str | None, step_range: str | None = None) -> object:
    from steplab.reading.traces.digest import digest
    from steplab.reading.traces.reading import read_trace

    return digest(read_trace(trace, on_progress), source=source, step_range=step_range)


def rank(on_progress: OnProgress, trace: Path, *, step_range: str | None, whole: int) -> object:
    """Reduce one rank's trace to a RankTrace; a `whole` other than 0 adds its Profile."""
    from dataclasses import replace

    from steplab.reading.traces.digest import digest
    from steplab.reading.traces.ranks import rank_trace
    from steplab.reading.traces.reading import read_trace

    read = read_trace(trace, on_progress)
    found = rank_trace(read, step_range)
    return replace(found, profile=digest(read, step_range=step_range)) if whole else found


def traced_steps(on_progress: OnProgress, trace: Path) -> object:
    from steplab.reading.traces.communication import traced_steps as of
    from steplab.reading.traces.reading import read_trace

    return of(read_trace(trace, on_progress))


def memory(
    on_progress: OnProgress, snapshot: Path, marks: Path | None = None, *, unwatched_peak_bytes: int | None
) -> object:
    from steplab.reading.snapshots.digest import check_same_history, digest, read_marks
    from steplab.reading.snapshots.reading import read_snapshot

    owners = read_marks(marks) if marks else None  # first, because it is quick
    history = read_snapshot(snapshot, on_progress)
    if owners and marks:
        check_same_history(owners, history, marks)
    return digest(history, owners, unwatched_peak_bytes=unwatched_peak_bytes)


_WORK: dict[str, Callable[..., object]] = {work.__name__: work for work in (profile, rank, traced_steps, memory)}


def main() -> None:
    """Answer the request in the arguments. The process ends when stdin does, because its parent has ended."""
    request, *paths = sys.argv[1:]
    asked = msgspec.json.decode(request, type=Request)
    _bound(asked)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would each take memory
    gc.disable()  # a snapshot is millions of objects without garbage
    try:
        _answer(_answered(asked, map(Path, paths)))
    except MemoryError:
        os._exit(NO_MEMORY)
    os._exit(0)  # skips freeing millions of objects


def _answered(asked: Request, paths: Iterable[Path]) -> Answer:
    try:
        return Read(msgspec.Raw(msgspec.json.encode(_WORK[asked.what](_teller(), *paths, **asked.options))))
    except SteplabError as error:
        return NotRead(str(error).encode("utf-8", "backslashreplace").decode(), error.exit_code)
    except MemoryError:
        raise
    except Exception:
        return Broken(traceback.format_exc())


def _bound(request: Request) -> None:
    """Set operating-system limits on memory and processor time, and end with the parent process."""
    bounds = {
        resource.RLIMIT_DATA: request.memory_bytes,
        resource.RLIMIT_CPU: request.processor_s,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in bounds.items():
        soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    if hasattr(os, "O_ASYNC"):  # SIGIO ends the process when the pipe closes
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def _teller() -> OnProgress:
    told_s = 0.0

    def tell(done_bytes: int, size_bytes: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s > _TELL_S or done_bytes == size_bytes:
            told_s = now_s
            _answer(Told(done_bytes, size_bytes))

    return tell


def _answer(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
