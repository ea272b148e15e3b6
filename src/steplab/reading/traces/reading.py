"""Read a trace file of any profiler, recognised by content, into a Trace."""

from pathlib import Path

from steplab.errors import UserError
from steplab.reading.traces.document import CHUNK_BYTES, NotATrace
from steplab.reading.traces.kineto import read_kineto
from steplab.reading.traces.nsys import SQLITE_MAGIC, read_nsys
from steplab.reading.traces.trace import Trace
from steplab.unpacking import OnProgress, Unpacked, unwatched

_WHAT_IS_READ = "steplab reads Kineto traces (.json, .gz, .xz) and Nsight Systems exports (nsys export --type sqlite)"


def read_trace(path: Path, on_progress: OnProgress = unwatched, *, chunk_bytes: int = CHUNK_BYTES) -> Trace:
    """Read the trace; notes name missing parts. `on_progress` gets bytes read and the file's size. JSON is decoded in
    `chunk_bytes`. Raises UserError for a file that cannot be opened or has no trace.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            head = file.read(len(SQLITE_MAGIC))
            if not head:
                raise UserError(f"{path} is empty")
            if head == SQLITE_MAGIC:
                return read_nsys(path, on_progress)
            file.seek(0)
            return _read_json(path, Unpacked(file, on_progress, size_bytes=size_bytes), chunk_bytes)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _read_json(path: Path, source: Unpacked, chunk_bytes: int) -> Trace:
    try:
        return read_kineto(source, chunk_bytes=chunk_bytes)
    except NotATrace as error:
        why = " and ".join(filter(None, (source.damage, str(error))))
        raise UserError(f"{path} has no trace: {why or 'it is neither JSON nor SQLite'}; {_WHAT_IS_READ}") from error
