"""The tables, and the store's format, which is the file's user_version."""

import sqlite3

from steplab.store.location import APPLICATION_ID

CURRENT_VERSION = 3
"""A later format upgrades this one here, within the caller's transaction."""
_TABLES = (
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
)
_STATEMENTS = {" ".join(made.split()) for made in _TABLES}


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


def create(connection: sqlite3.Connection) -> None:
    """Create the tables in a blank file; the caller holds the transaction."""
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {CURRENT_VERSION}")


def pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
