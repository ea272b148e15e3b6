"""Reads the records of a store one by one, so that a damaged one hides none of the others."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from steplab.errors import SteplabError
from steplab.records.codec import decode, encode
from steplab.records.record import Record
from steplab.records.registry import KINDS, kind_of, summary_row
from steplab.records.store_condition import UnreadableRecord

_MOST_ROWS_PER_PAGE = 40
"""More records than fit into a page of the file: a row alone takes over a hundred bytes."""
_COLUMNS = ("seq", "id", "kind", "schema", "created_utc", "name", "study", "cell", "status", "summary", "body")
_RECORDS = f"SELECT {', '.join(_COLUMNS[:1] + tuple(f'CAST({name} AS BLOB)' for name in _COLUMNS[1:]))} FROM record"
"""Texts are read as bytes, which SQLite does not refuse if they are no UTF-8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRecord:
    """A row of the store's table of records."""

    columns: dict[str, Any]
    """The row as it is, by its columns: seq, and bytes or None for each other one."""
    renewed: dict[str, Any]
    """The row as it would be stored today; as it is where the record cannot be read, or belongs to a newer steplab."""
    problem: str | None = None
    """Why the record cannot be read; None if it can, or belongs to a newer steplab."""

    @property
    def is_outdated(self) -> bool:
        """Whether it would be stored otherwise today: an earlier version stored it, or its row is damaged."""
        return self.renewed != self.columns

    def text(self, column: str) -> str:
        """The text of a column, with a mark in place of each byte that is none."""
        return (self.columns[column] or b"").decode(errors="replace")

    def unreadable(self) -> UnreadableRecord:
        """What is known of a record that cannot be read."""
        known = {name: self.text(name) for name in ("id", "kind", "created_utc")}
        return UnreadableRecord(**known, why=self.problem or "")


def stored_records(sqlite: sqlite3.Connection) -> Iterator[StoredRecord | None]:
    """Each row of the table of records in order, and None for each place that SQLite cannot read."""
    last = 0
    try:
        for row in sqlite.execute(f"{_RECORDS} ORDER BY seq"):
            last = row[0]
            yield _read(row)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and not _is_damage(error):
            raise
        for place in range(last + 1, _highest(sqlite) + 1):
            try:
                found = sqlite.execute(f"{_RECORDS} WHERE seq = ?", (place,)).fetchone()
            except sqlite3.DatabaseError:
                yield None
            else:
                if found is not None:
                    yield _read(found)


def _is_damage(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _highest(sqlite: sqlite3.Connection) -> int:
    try:
        return int(sqlite.execute("SELECT max(seq) FROM record").fetchone()[0] or 0)
    except sqlite3.DatabaseError:
        return int(sqlite.execute("PRAGMA page_count").fetchone()[0]) * _MOST_ROWS_PER_PAGE


def _read(row: tuple[Any, ...]) -> StoredRecord:
    columns = dict(zip(_COLUMNS, row, strict=True))
    try:
        return StoredRecord(columns=columns, renewed=columns | _renewed(decode(columns["body"] or b"")))
    except SteplabError as error:
        return StoredRecord(
            columns=columns, renewed=columns, problem=None if _is_newer(columns["body"]) else str(error)
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Decoded, and yet no record that steplab can have made.
        return StoredRecord(columns=columns, renewed=columns, problem=f"{type(error).__name__}: {error}")


def _renewed(record: Record) -> dict[str, bytes]:
    """The columns that follow from the record."""
    texts = {name: getattr(record, name).encode() for name in ("id", "schema", "created_utc", "name", "status")}
    return texts | {"kind": kind_of(record).name.encode(), "summary": encode(summary_row(record))}


class _Head(msgspec.Struct):
    schema: str


def _is_newer(body: bytes | None) -> bool:
    """Whether a record that cannot be read is one of a kind, or of a format, that only a later steplab knows."""
    try:
        schema = msgspec.json.decode(body or b"", type=_Head).schema
        msgspec.json.decode(body or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return schema.startswith("steplab.") and schema not in {kind.schema for kind in KINDS.values()}
