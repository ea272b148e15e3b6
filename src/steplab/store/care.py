"""Checks and copies the store's file.

SQLite's `.recover` repairs damage, `VACUUM` returns free space (docs/reliability.md).
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
from steplab.store.connection import is_damage, network_file_system, open_to_read, pragma, sqlite_errors, version_of

_MOST_DAMAGE = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    path: Path
    format: int
    size_bytes: int
    free_bytes: int
    journal: str
    """SQLite's journal mode: wal (write-ahead log) or, on network folders, delete."""
    file_system: str | None
    num_records: int
    damage: tuple[str, ...]
    records: tuple[str, ...]
    """A line per damaged record, with the fix."""


def check(path: Path, timeout_s: float = 30.0) -> Condition:
    """Read everything in the store, changing nothing. Raises SteplabError if it cannot be opened."""
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
            format=version_of(sqlite),
            size_bytes=page_bytes * pragma(sqlite, "page_count"),
            free_bytes=page_bytes * pragma(sqlite, "freelist_count"),
            journal=str(sqlite.execute("PRAGMA journal_mode").fetchone()[0]),
            file_system=network_file_system(path),
            num_records=num_records,
            damage=tuple(damage),
            records=tuple(damaged),
        )


def copy(path: Path, target: Path, timeout_s: float = 30.0) -> None:
    with closing(open_to_read(path, timeout_s)) as connection:
        connection.copy_to(target)


@contextmanager
def _damage_in(damage: dict[str, None]) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        damage[str(error)] = None


def _problems(path: Path, seq: int, record_id: str, summary: bytes, body: bytes) -> list[str]:
    try:
        record = decode(body)
        summary_row(record)
    except UnknownFormat:
        return []
    except (SteplabError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # decoding failed, or gave a record that steplab cannot have made
        return [f"record {record_id} is unreadable: {error}; remove it: `steplab rm {record_id}`"]
    if record.id != record_id:
        sql = f"UPDATE record SET id = json_extract(CAST(body AS TEXT), '$.id') WHERE seq = {seq}"
        fix = f'repair: `sqlite3 {path} "{sql}"`'
        return [f"record {record.id} is listed as {record_id!r}; {fix}"]
    try:
        msgspec.json.decode(summary)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
        fix = "rebuild: `steplab export`, `steplab rm`, `steplab import`"
        return [f"the listed figures of record {record_id} are damaged; {fix}"]
    return []
