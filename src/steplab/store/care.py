"""Examines the file of a store, and copies it.

Damage of the file is left to SQLite's own `.recover`, and free space in it to `VACUUM` (docs/reliability.md).
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from steplab.errors import SteplabError
from steplab.records.codec import UnknownFormat, decode
from steplab.records.registry import summary_row
from steplab.store.connection import is_damage, network_file_system, open_to_read, sqlite_errors
from steplab.store.schema import pragma, version

_MOST_DAMAGE = 20
"""Number of findings of SQLite's integrity check that are reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """The condition of a store's file."""

    path: Path
    """The file."""
    format: int
    """The store's format."""
    size_bytes: int
    """Size of the file."""
    free_bytes: int
    """Bytes of it that hold nothing."""
    journal: str
    """SQLite's journal mode: wal (write-ahead log) or, on network folders, delete."""
    file_system: str | None
    """The network file system that the store is on; None: a local one, or not known."""
    num_records: int
    """Number of records that were read, damaged ones included."""
    damage: tuple[str, ...]
    """SQLite's findings about the file; empty for a sound one."""
    records: tuple[str, ...]
    """A line for each damaged record, which names the fix."""


def check(path: Path, timeout_s: float = 30.0) -> Condition:
    """Read everything in the store, and change nothing. Raises SteplabError where it cannot be opened at all."""
    with closing(open_to_read(path, timeout_s)) as connection, sqlite_errors(path):
        sqlite = connection.sqlite
        num_records, damage, damaged = 0, dict[str, None](), list[str]()
        with _damage_in(damage):
            for (found,) in sqlite.execute(f"PRAGMA integrity_check({_MOST_DAMAGE})"):
                damage |= {} if found == "ok" else {str(found): None}
        with _damage_in(damage):
            for row in sqlite.execute("SELECT seq, id, summary, body FROM record ORDER BY seq"):
                num_records += 1
                damaged += _problems(path, *row)
        page_bytes = pragma(sqlite, "page_size")
        return Condition(
            path=path,
            format=version(sqlite),
            size_bytes=page_bytes * pragma(sqlite, "page_count"),
            free_bytes=page_bytes * pragma(sqlite, "freelist_count"),
            journal=str(sqlite.execute("PRAGMA journal_mode").fetchone()[0]),
            file_system=network_file_system(path),
            num_records=num_records,
            damage=tuple(damage),
            records=tuple(damaged),
        )


def copy(path: Path, target: Path, timeout_s: float = 30.0) -> None:
    """Copy the store to a new file as it is at one moment; others may read and write it meanwhile."""
    with closing(open_to_read(path, timeout_s)) as connection:
        connection.copy_to(target)


@contextmanager
def _damage_in(damage: dict[str, None]) -> Iterator[None]:
    """Add the error with which reading ends at a page that is lost."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        damage[str(error)] = None


def _problems(path: Path, seq: int, record_id: str, summary: bytes, body: bytes) -> list[str]:
    """One line if the record is damaged. One that only a later steplab knows is not."""
    try:
        record = decode(body)
        summary_row(record)
    except UnknownFormat:
        return []
    except (SteplabError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # not decoded, or decoded and yet no record that steplab can have made
        return [f"record {record_id} cannot be read: {error}; `steplab rm {record_id}` removes it"]
    if record.id != record_id:
        sql = f"UPDATE record SET id = json_extract(CAST(body AS TEXT), '$.id') WHERE seq = {seq}"
        fix = f'`sqlite3 {path} "{sql}"` mends it'
        return [f"record {record.id} is listed as {record_id!r}; {fix}"]
    try:
        msgspec.json.decode(summary)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
        fix = "`steplab export`, `steplab rm` and `steplab import` make it again"
        return [f"the figures of record {record_id} in lists are damaged; {fix}"]
    return []
