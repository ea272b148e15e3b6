"""Import exported records from files into the store."""

import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from steplab.errors import SteplabError, UserError
from steplab.lab.keeping import open_store
from steplab.limits import LimitReached, Limits
from steplab.records.record import Record
from steplab.store.location import SQLITE_MAGIC
from steplab.store.record_table import ForeignRecord, read_foreign
from steplab.units import format_bytes
from steplab.unpacking import Unpacked

_BUFFER_BYTES = 1 << 18


def import_files(
    files: Sequence[Path | str] | Path | str, store: Path | str | None = None, *, limits: Limits | None = None
) -> tuple[int, int]:
    """Store the records in files of JSON lines, plain or compressed by gzip or xz, all or none; `-` is standard input.

    Returns how many were added and how many were already stored. Raises UserError for a file that cannot be read or has
    more than the limits allow (None: the usual ones), with file and line for a line that is not a valid record, and if
    no file holds a record; SteplabError, with file and line, for a line with the id of another record in the store.
    """
    given = [Path(file) for file in ((files,) if isinstance(files, (str, Path)) else files)]
    try:
        found = [foreign for file in given for foreign in _records(file, limits or Limits())]
    except UserError as error:
        raise UserError(f"{error}; nothing was imported") from error
    if not found:
        raise UserError(f"nothing to import: no record in {', '.join(map(str, given))}")
    with open_store(store, write=True) as opened:
        return opened.import_records(found)


def read_records(file: Path) -> list[Record]:
    """The records in a file of JSON lines, plain or compressed by gzip or xz. Raises as `import_files` does."""
    found = [foreign.record for foreign in _records(file, Limits())]
    if not found:
        raise UserError(f"there is no record in {file}")
    return found


def _records(file: Path, limits: Limits) -> Iterator[ForeignRecord]:
    try:
        if str(file) == "-":
            yield from _in_lines(file, sys.stdin.buffer, limits)
        else:
            with file.open("rb", buffering=0) as stream:
                yield from _in_lines(file, stream, limits)
    except LimitReached as error:
        raise UserError(f"{file}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error


def _in_lines(file: Path, stream: IO[bytes], limits: Limits) -> Iterator[ForeignRecord]:
    unpacked = Unpacked(stream, most_bytes=limits.import_bytes)
    lines = io.BufferedReader(unpacked, _BUFFER_BYTES)
    number = 0
    while line := lines.readline(limits.record_bytes + 1):
        number += 1
        if len(line) > limits.record_bytes:
            raise LimitReached(f"line {number} has more than {format_bytes(limits.record_bytes)}")
        if number > limits.num_lines:
            raise LimitReached(f"it has more than {limits.num_lines:,} lines")
        if unpacked.damage:
            raise UserError(f"{file} is a damaged compressed file: {unpacked.damage}")
        if line.strip():
            try:
                yield read_foreign(f"{file}, line {number}", line)
            except SteplabError as error:
                if number == 1 and line.startswith(SQLITE_MAGIC):
                    how = f"`steplab export --store {file} --output records.jsonl` makes an export of it"
                    raise UserError(f"{file} is a database, and no export; if it is a store, {how}") from error
                raise UserError(str(error)) from error
    if unpacked.damage:
        raise UserError(f"{file} is a damaged compressed file: {unpacked.damage}")
