"""Import exported records from files into the store."""

import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.store.record_table import ForeignRecord, read_foreign
from steplab.units import format_bytes

LARGEST_UNPACKED_BYTES = 1 << 30
"""Largest unpacked size of a compressed file; larger ones are refused, since a few kilobytes can unpack to any size."""
_GZIP_MAGIC, _XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"


def import_files(files: Sequence[Path | str] | Path | str, store: Path | str | None = None) -> tuple[int, int]:
    """Store the records in files of JSON lines, plain or compressed by gzip or xz, all or none; `-` is standard input.

    Returns how many were added and how many were already stored. Raises UserError for a file that cannot be read or if
    no file holds a record, and SteplabError, with file and line, for a line that is not a valid record or that has the
    id of another record.
    """
    given = [Path(file) for file in ((files,) if isinstance(files, (str, Path)) else files)]
    found = [foreign for file in given for foreign in _records(file)]
    if not found:
        raise UserError(f"nothing to import: no record in {', '.join(map(str, given))}")
    with open_store(store, write=True) as opened:
        return opened.import_records(found)


def _records(file: Path) -> Iterator[ForeignRecord]:
    try:
        if str(file) == "-":
            yield from _in_lines(file, io.BufferedReader(sys.stdin.buffer))  # type: ignore[arg-type]
        else:
            with file.open("rb") as stream:
                yield from _in_lines(file, stream)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{file} is a damaged compressed file: {error}") from error


def _in_lines(file: Path, stream: io.BufferedReader) -> Iterator[ForeignRecord]:
    head = stream.peek(len(_XZ_MAGIC))
    lines: io.BufferedIOBase = stream
    if head.startswith(_GZIP_MAGIC):
        lines = gzip.GzipFile(fileobj=stream)
    elif head.startswith(_XZ_MAGIC):
        lines = lzma.LZMAFile(stream)  # noqa: SIM115  # what it reads from is closed by whoever opened it
    left, number = LARGEST_UNPACKED_BYTES, 0
    while line := lines.readline(left + 1 if lines is not stream else -1):
        left, number = left - len(line), number + 1
        if lines is not stream and left < 0:
            most = format_bytes(LARGEST_UNPACKED_BYTES)
            raise UserError(f"{file} unpacks to more than {most}; if that is right, unpack it and import the result")
        if line.strip():
            yield read_foreign(f"{file}, line {number}", line)
