"""The tables, as a list of migrations: the file's user_version says how many of them it has seen.

Keys of cells and rows are computed again from the records where a new format changes them.
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
    """Upgrade to format 2: keys leave out fields that have their default, and rows have every field.

    The caller holds the transaction. Bodies are read and not changed. A record that cannot be read keeps its key and
    its row: its cell counts as not measured.
    """
    found = sqlite.execute("SELECT seq, cell, body FROM record WHERE kind = 'run' OR cell IS NOT NULL")
    changed = [(*_made_again(record, cell), seq) for seq, cell, body in found if (record := _record(body))]
    sqlite.executemany("UPDATE record SET cell = ?, summary = ? WHERE seq = ?", changed)


def to_format_3(sqlite: sqlite3.Connection) -> None:
    """Upgrade to format 3: rows have the record's kind, software and warnings. The caller holds the transaction."""
    found = sqlite.execute("SELECT seq, body FROM record")
    rows = [(encode(summary_row(record)), seq) for seq, body in found if (record := _record(body))]
    sqlite.executemany("UPDATE record SET summary = ? WHERE seq = ?", rows)


def _made_again(record: Record, cell: str | None) -> tuple[str | None, bytes]:
    """The updated key, if the record has one, and the updated row."""
    return cell_key(record.cell) if cell and record.cell else cell, encode(summary_row(record))


def _record(body: bytes) -> Record | None:
    try:
        return decode(body)
    except SteplabError:
        return None


# A migration is a tuple of single statements, because sqlite3's executescript would end the transaction that
# makes it all-or-nothing, or of functions that execute some. One that has been released is never edited; a change is a
# new one behind it.
#
# record.seq orders records made within one second. summary holds the flat row of records/rows.py, so that a
# listing never reads a body; body is the record's JSON with every raw sample. study.cells is a JSON list of
# cell keys; it and the other two are NULL for a study known only by its imported records. A study that was begun in
# format 1 keeps that format's fingerprint (store/cells.py): the specs of cells not yet measured are not known.
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
    """Whether no program has written to the file yet."""
    if pragma(connection, "application_id") or version(connection):
        return False
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None


def is_ours(connection: sqlite3.Connection) -> bool:
    """Whether steplab made the file."""
    return pragma(connection, "application_id") == APPLICATION_ID


def not_ours(connection: sqlite3.Connection) -> str | None:
    """A table or anything else that no migration made, in words; None if there is nothing.

    A view, a trigger, a generated column, an expression in an index, a conflict clause: each computes, hangs or
    swallows what is stored. Tables that `.recover` adds (lost_and_found) are never read.
    """
    for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"):
        is_added = str(name).startswith("lost_and_found") and str(sql).startswith(f"CREATE TABLE {name}(")
        if " ".join(str(sql).split()) not in _STATEMENTS and not is_added:
            return f"the table, index, view or trigger {str(name)[:100]!a}"
    return None


def version(connection: sqlite3.Connection) -> int:
    """The number of migrations that were applied to the file."""
    return pragma(connection, "user_version")


def migrate(connection: sqlite3.Connection) -> None:
    """Apply the migrations that the file lacks; the caller holds the transaction."""
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
    """The number that SQLite gives for one of its settings."""
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
