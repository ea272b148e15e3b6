"""The tables, as migrations; the file's user_version counts the applied ones.

A new format recomputes keys of cells and rows from the records.
"""

import sqlite3
from collections.abc import Callable

from steplab.errors import SteplabError
from steplab.records.codec import decode, encode
from steplab.records.record import Record
from steplab.records.registry import summary_row
from steplab.store.cells import cell_key
from steplab.store.location import APPLICATION_ID


def to_format_2(sqlite: sqlite3.Connection) -> None:
    """Upgrade to format 2: keys omit defaults, rows have every field. The caller holds the transaction.

    Bodies are not changed. An unreadable record keeps key and row: its cell counts as not measured.
    """
    found = sqlite.execute("SELECT seq, cell, body FROM record WHERE kind = 'run' OR cell IS NOT NULL")
    changed = [(*_made_again(record, cell), seq) for seq, cell, body in found if (record := _record(body))]
    sqlite.executemany("UPDATE record SET cell = ?, summary = ? WHERE seq = ?", changed)


def to_format_3(sqlite: sqlite3.Connection) -> None:
    """Upgrade to format 3: rows have kind, software and warnings. The caller holds the transaction."""
    found = sqlite.execute("SELECT seq, body FROM record")
    rows = [(encode(summary_row(record)), seq) for seq, body in found if (record := _record(body))]
    sqlite.executemany("UPDATE record SET summary = ? WHERE seq = ?", rows)


def _made_again(record: Record, cell: str | None) -> tuple[str | None, bytes]:
    return cell_key(record.cell) if cell and record.cell else cell, encode(summary_row(record))


def _record(body: bytes) -> Record | None:
    try:
        return decode(body)
    except SteplabError:
        return None


# A migration is a tuple of functions or single statements: sqlite3's executescript would end the transaction that makes
# it all-or-nothing. Released ones are never edited; a change is a new one.
MIGRATIONS: tuple[tuple[str | Callable[[sqlite3.Connection], None], ...], ...] = (
    (
        """
        CREATE TABLE record (
            seq INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            kind TEXT NOT NULL,
            schema TEXT NOT NULL,
            created_utc TEXT NOT NULL,
            name TEXT NOT NULL,
            study TEXT,
            cell TEXT,
            status TEXT NOT NULL,
            summary BLOB NOT NULL,
            body BLOB NOT NULL
        )
        """,
        "CREATE INDEX record_by_time ON record (created_utc)",
        "CREATE INDEX record_by_cell ON record (study, cell, kind, created_utc)",
        """
        CREATE TABLE study (
            seq INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            name TEXT NOT NULL,
            description TEXT NOT NULL,
            created_utc TEXT NOT NULL,
            fingerprint TEXT,
            num_cells INTEGER,
            cells TEXT
        )
        """,
        "CREATE INDEX study_by_fingerprint ON study (fingerprint)",
    ),
    (to_format_2,),
    (to_format_3,),
)
CURRENT_VERSION = len(MIGRATIONS)
_STATEMENTS = {" ".join(made.split()) for migration in MIGRATIONS for made in migration if isinstance(made, str)}


def is_blank(connection: sqlite3.Connection) -> bool:
    """True if no program has written to the file."""
    if pragma(connection, "application_id") or version(connection):
        return False
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None


def is_ours(connection: sqlite3.Connection) -> bool:
    return pragma(connection, "application_id") == APPLICATION_ID


def not_ours(connection: sqlite3.Connection) -> str | None:
    """Foreign tables and indexes, in words; else None.

    Views, triggers, generated columns, index expressions and conflict clauses compute, hang or swallow data. Tables
    added by `.recover` (lost_and_found) are never read.
    """
    for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"):
        is_added = str(name).startswith("lost_and_found") and str(sql).startswith(f"CREATE TABLE {name}(")
        if " ".join(str(sql).split()) not in _STATEMENTS and not is_added:
            return f"the table, index, view or trigger {str(name)[:100]!a}"
    return None


def version(connection: sqlite3.Connection) -> int:
    return pragma(connection, "user_version")


def migrate(connection: sqlite3.Connection) -> None:
    """Apply missing migrations; the caller holds the transaction."""
    for statements in MIGRATIONS[version(connection) :]:
        for statement in statements:
            if isinstance(statement, str):
                connection.execute(statement)
            else:
                statement(connection)
    if version(connection) != CURRENT_VERSION:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {CURRENT_VERSION}")


def pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
