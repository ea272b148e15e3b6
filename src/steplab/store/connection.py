"""Opens the store's file, to write or only to read, and turns SQLite's exceptions into SteplabError."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from steplab.errors import SteplabError
from steplab.store import schema
from steplab.store.failures import NAME_ANOTHER, not_writable, sqlite_errors


class Connection:
    """An open store; every method raises SteplabError if SQLite fails."""

    def __init__(self, path: Path, sqlite: sqlite3.Connection) -> None:
        self.path = path
        self._sqlite = sqlite

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows that a statement returns."""
        with sqlite_errors(self.path):
            return self._sqlite.execute(sql, values).fetchall()

    def stream(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """The rows that a statement returns, one at a time, for rows with bodies, which need not all fit into
        memory."""
        with sqlite_errors(self.path):
            yield from self._sqlite.execute(sql, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction: all writes inside happen, or none; other writers wait, and readers see the state before."""
        with sqlite_errors(self.path):
            # IMMEDIATE takes the write lock now: a transaction that first reads and then asks for it fails at
            # once, without waiting, if another process wrote in between.
            self._sqlite.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._sqlite.execute("COMMIT")
            except BaseException:
                if self._sqlite.in_transaction:  # a full disk has already rolled it back
                    self._sqlite.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file; further calls fail."""
        with sqlite_errors(self.path):
            self._sqlite.close()


def open_to_write(path: Path, timeout_s: float) -> Connection:
    """Open, create or upgrade the store at `path`, and prove that it can be written.

    Raises SteplabError if it cannot, or if the file is damaged, is another program's or a newer steplab's;
    such a file is left exactly as it was.
    """
    with sqlite_errors(path):
        _make_folder(path)
        _refuse_folder(path)
        if path.exists() and not os.access(path, os.W_OK):
            # SQLite would open it read-only, and leave companions behind that it cannot remove.
            raise SteplabError(not_writable(path))
        sqlite = _connect(path, "mode=rwc", timeout_s)
        connection = Connection(path, sqlite)
        try:
            _check_origin(path, sqlite)
            _use_write_ahead_log(sqlite, timeout_s)
            with connection.transaction():
                _check_origin(path, sqlite)  # again: another process may have been faster
                schema.migrate(sqlite)
            _prove_writable(sqlite)
        except BaseException:
            sqlite.close()
            raise
    return connection


def _make_folder(path: Path) -> None:
    """Make the store's folder, but not the folder around it, so that a typing error makes no tree of folders."""
    try:
        path.parent.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        why = f"there is no folder {path.parent.parent}"
        raise SteplabError(f"cannot make the store {path}: {why}; {NAME_ANOTHER}") from error


def open_to_read(path: Path, timeout_s: float) -> Connection:
    """Open the store at `path` without changing or leaving anything on disk.

    Raises SteplabError if there is none yet, or if the file is damaged, is another program's or a newer
    steplab's.
    """
    with sqlite_errors(path):
        if not path.exists():
            raise SteplabError(f"no store at {path} yet; `steplab run` makes one")
        _refuse_folder(path)
        sqlite = _connect(path, _reading_mode(path), timeout_s)
        try:
            sqlite.execute("PRAGMA query_only = ON")
            _check_origin(path, sqlite)
            seen = schema.version(sqlite)
        except BaseException:
            sqlite.close()
            raise
        if seen:  # all formats have the same tables; a writer brings the keys of cells up to date
            return Connection(path, sqlite)
        sqlite.close()
    raise SteplabError(f"no store at {path} yet, the file is empty; `steplab run` makes one")


def _reading_mode(path: Path) -> str:
    """How to open a file so that reading it works and leaves no trace.

    A store in write-ahead mode has two companions while it is open, -wal and -shm; SQLite creates them even
    for a reader, and a read-only connection cannot remove them again.
    """
    log, shared = Path(f"{path}-wal"), Path(f"{path}-shm")
    # A writer is at work or was killed: its companion files serve reading too, and stay as they are.
    if log.exists() and shared.exists():
        return "mode=ro"
    # The companions are made now and removed on closing; query_only prevents writing.
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return "mode=rw"
    if log.exists() and log.stat().st_size > 0:
        raise SteplabError(
            f"the store {path} has unfinished writes in {log.name}, which cannot be read where it is "
            "read-only; copy both files into a writable folder and name the copy with --store"
        )
    # Nobody has it open, and the companions cannot be made: read the bare file without locks.
    return "mode=ro&immutable=1"


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise SteplabError(f"the store {path} is a folder, not a file; {NAME_ANOTHER}")


def _connect(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    # as_uri escapes a ? or # in the path. isolation_level=None: transactions begin where we say.
    return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=timeout_s, isolation_level=None)


def _check_origin(path: Path, sqlite: sqlite3.Connection) -> None:
    if schema.is_blank(sqlite):
        return
    if not schema.is_ours(sqlite):
        raise SteplabError(f"{path} is another program's SQLite file, not a steplab store; {NAME_ANOTHER}")
    seen = schema.version(sqlite)
    if seen > schema.CURRENT_VERSION:
        raise SteplabError(
            f"the store {path} has format {seen}, newer than the {schema.CURRENT_VERSION} this version "
            "knows, and was left unchanged; upgrade steplab"
        )


def _prove_writable(sqlite: sqlite3.Connection) -> None:
    # The lock alone proves nothing: in write-ahead mode a read-only file grants it too.
    sqlite.execute("BEGIN IMMEDIATE")
    sqlite.execute(f"PRAGMA user_version = {schema.CURRENT_VERSION}")
    sqlite.execute("ROLLBACK")


def _use_write_ahead_log(sqlite: sqlite3.Connection, timeout_s: float) -> None:
    """Let readers read while a writer writes; synchronous stays FULL, so that a commit survives a power cut.

    The switch, needed once in a file's life, does not wait for locks by itself. Where the file system cannot
    do it (some network mounts), SQLite stays with its rollback journal, which is as safe.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            sqlite.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
