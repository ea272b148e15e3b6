"""Opens the store's file; SQLite's exceptions become errors with the fix. `user_version` is the store's format."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from steplab.errors import Remark, SteplabError, UserError, warn_caller
from steplab.store.location import APPLICATION_ID

CURRENT_VERSION = 3
"""Newest format of the file. Code that upgrades older ones belongs here, within the caller's transaction."""
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
    if pragma(connection, "application_id") or version_of(connection):
        return False
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None


def not_ours(connection: sqlite3.Connection) -> str | None:
    """Name of a table, index, view or trigger that steplab did not make; else None.

    Views, triggers, generated columns, index expressions and conflict clauses can compute, hang or drop data. Tables
    added by `.recover` (lost_and_found) pass, because they are never read.
    """
    for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"):
        is_added = str(name).startswith("lost_and_found") and str(sql).startswith(f"CREATE TABLE {name}(")
        if " ".join(str(sql).split()) not in _STATEMENTS and not is_added:
            return f"the table, index, view or trigger {str(name)[:100]!a}"
    return None


def version_of(connection: sqlite3.Connection) -> int:
    return pragma(connection, "user_version")


def create(connection: sqlite3.Connection) -> None:
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {CURRENT_VERSION}")


def pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


MOVE_AWAY = "move it away, and `steplab import` an export, if any, into a new store"
NAME_ANOTHER = "choose another store by --store or STEPLAB_STORE"
RECOVER = "`sqlite3 {path} .recover | sqlite3 new.db` recovers what it can into a new store"
_LOCKED = "another process has locked the store {path}; wait for it or end it, then repeat"

_MESSAGES: dict[int, str] = {
    sqlite3.SQLITE_NOTADB: f"{{path}} is not a steplab store, nor an SQLite file; {MOVE_AWAY}",
    sqlite3.SQLITE_CORRUPT: f"the store {{path}} is damaged; {RECOVER}",
    sqlite3.SQLITE_READONLY: (
        f"the store {{path}} is not writable; make it and its folder writable, or {NAME_ANOTHER}"
    ),
    sqlite3.SQLITE_PERM: f"the store {{path}} is not accessible; change its permissions, or {NAME_ANOTHER}",
    sqlite3.SQLITE_CANTOPEN: (
        f"cannot open the store {{path}}; make it and its folder readable and writable, or {NAME_ANOTHER}"
    ),
    sqlite3.SQLITE_FULL: (f"the disk is full: the store {{path}} cannot grow; free some space, or {NAME_ANOTHER}"),
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_IOERR: (
        f"the disk failed under the store {{path}} ({{error}}); check it and its space, or {NAME_ANOTHER}"
    ),
    sqlite3.SQLITE_CONSTRAINT: "the store {path} refuses the record ({error}); please report this as a bug",
}
_NO_LOCKS = (
    f"the file system of the store {{path}} lacks working locks ({{error}}), as some network folders do; "
    f"{NAME_ANOTHER}, on a local disk"
)
_OF_LOCKS = {
    *(sqlite3.SQLITE_IOERR_LOCK, sqlite3.SQLITE_IOERR_UNLOCK, sqlite3.SQLITE_IOERR_RDLOCK, sqlite3.SQLITE_PROTOCOL),
    *(sqlite3.SQLITE_IOERR_SHMLOCK, sqlite3.SQLITE_IOERR_SHMMAP, sqlite3.SQLITE_IOERR_SHMOPEN),
    sqlite3.SQLITE_IOERR_CHECKRESERVEDLOCK,
}
_OTHER = f"the store {{path}} failed ({{error}}); if that repeats, {MOVE_AWAY}"


def is_damage(error: sqlite3.Error) -> bool:
    """True if the file's content is the cause, not a lock or the disk."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Convert errors of sqlite3 and of the file system into SteplabError, with the store's path and the fix."""
    try:
        yield
    except sqlite3.Error as error:
        # The low byte of an extended code is its family: SQLITE_READONLY_DIRECTORY is SQLITE_READONLY.
        code = getattr(error, "sqlite_errorcode", 0)
        message = _NO_LOCKS if code in _OF_LOCKS else _MESSAGES.get(code & 0xFF, _OTHER)
        raise SteplabError(message.format(path=path, error=error)) from error
    except OSError as error:
        raise SteplabError(f"cannot open the store {path}: {error.strerror}; {NAME_ANOTHER}") from error
    except UnicodeDecodeError as error:  # a name in the file, or SQLite's message
        raise SteplabError(_MESSAGES[sqlite3.SQLITE_CORRUPT].format(path=path, error=error)) from error
    except (UnicodeEncodeError, OverflowError) as error:
        raise UserError(
            f"a given text or number does not fit the store {path} ({error}); use valid "
            "text, and whole numbers below 2^63"
        ) from error


_NETWORK = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afpfs", "afs", "webdav", "davfs", "9p", "virtiofs"),
    *("ceph", "lustre", "gpfs", "beegfs", "glusterfs", "orangefs", "panfs", "wekafs", "ocfs2", "gfs2"),
    *("sshfs", "s3fs", "rclone", "gcsfuse", "juicefs", "goofys", "ceph-fuse"),
}


def network_file_system(path: Path) -> str | None:
    """Type of the network file system that holds the path; None: local, or unknown."""
    import psutil  # type: ignore[import-untyped]  # only a writer asks

    try:
        mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    except (OSError, RuntimeError):  # no list of mounts in this container
        return None
    folder = Path(os.path.realpath(path))
    kind = next((mounted[str(parent)] for parent in (folder, *folder.parents) if str(parent) in mounted), "")
    return kind if kind.removeprefix("fuse.") in _NETWORK else None


_BARE = "mode=ro&immutable=1"
_NO_SPACE = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL)
_COPY_WAITS_S = 30.0


class Connection:
    """Connection to the store; methods raise SteplabError if SQLite fails."""

    def __init__(self, path: Path, sqlite: sqlite3.Connection) -> None:
        self.path = path
        self.sqlite = sqlite
        """SQLite's own connection, which raises SQLite's errors."""

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with sqlite_errors(self.path):
            return self.sqlite.execute(sql, values).fetchall()

    def insert(self, table: str, **values: object) -> None:
        marks = ", ".join("?" * len(values))
        self.query(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", *values.values())

    def stream(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Yield rows one at a time, so that they need not all fit into memory."""
        with sqlite_errors(self.path):
            # `yield from` would close the cursor of a stopping reader, maybe after the store's closing.
            for row in self.sqlite.execute(sql, values):  # noqa: UP028
                yield row

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all writes inside, or none. Other writers wait; readers see the state before."""
        with sqlite_errors(self.path):
            # IMMEDIATE takes the write lock now. A transaction that reads first and then asks for it fails at once if
            # another process wrote in between.
            self.sqlite.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.sqlite.execute("COMMIT")
            except BaseException:
                if self.sqlite.in_transaction:  # a full disk already rolled it back
                    self.sqlite.execute("ROLLBACK")
                raise

    def copy_to(self, target: Path) -> None:
        with sqlite_errors(target), closing(sqlite3.connect(target)) as copy:
            self.sqlite.backup(copy, progress=_patience(self.path), sleep=0.05)

    def close(self) -> None:
        with sqlite_errors(self.path):
            self.sqlite.close()


def open_to_write(path: Path, timeout_s: float) -> Connection:
    """Open or create the store at `path`, and prove it writable.

    Raises SteplabError otherwise, and for a file that is damaged, another program's or a newer steplab's; such files
    stay unchanged.
    """
    with sqlite_errors(path):
        _make_folder(path)
        _refuse_folder(path)
        if path.exists() and not os.access(path, os.W_OK):
            # SQLite would open it read-only and leave companions that it cannot remove.
            raise SteplabError(_MESSAGES[sqlite3.SQLITE_READONLY].format(path=path))
        sqlite = _connect(path, "mode=rwc", timeout_s)
        connection = Connection(path, sqlite)
        try:
            _check_origin(path, sqlite)
            if 0 < (seen := version_of(sqlite)) < CURRENT_VERSION:
                raise SteplabError(
                    f"the store {path} has format {seen}, which only development versions wrote; `steplab export "
                    "--store` reads it, and `steplab import` puts the records into a new store"
                )
            _use_journal(path, sqlite, timeout_s)
            with connection.transaction():
                _check_origin(path, sqlite)  # another process may have been faster
                if is_blank(sqlite):
                    create(sqlite)
            _prove_writable(sqlite)
        except BaseException:
            sqlite.close()
            raise
    return connection


def _patience(path: Path) -> Callable[[int, int, int], None]:
    """Make the progress callback of a backup. It raises SteplabError if another process locks the store for too long.

    SQLite would retry forever and ignore Ctrl-C.
    """
    deadline_s = time.monotonic() + _COPY_WAITS_S

    def step(status: int, left: int, total: int) -> None:
        if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) and time.monotonic() > deadline_s:
            raise SteplabError(_LOCKED.format(path=path))

    return step


def _make_folder(path: Path) -> None:
    """Make the store's folder but not its parent, so that a typo makes no tree of folders."""
    try:
        path.parent.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        around = path.parent.parent
        why = f"{path.parent} cannot be created" if around.is_dir() else f"there is no folder {around}"
        raise SteplabError(f"cannot create the store {path}: {why}; {NAME_ANOTHER}") from error


def open_to_read(path: Path, timeout_s: float) -> Connection:
    """Open the store at `path` without leaving traces on disk.

    Raises SteplabError without a store, and for a file that is damaged, another program's or a newer steplab's.
    """
    with sqlite_errors(path):
        if not path.exists():
            raise SteplabError(f"no store at {path} yet; create one: `steplab run`")
        _refuse_folder(path)
        try:
            sqlite, seen = _reader(path, _reading_mode(path), timeout_s)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _NO_SPACE or _has_unfinished_writes(path):
                raise
            # A full disk has no room for companions, nor can others write.
            sqlite, seen = _reader(path, _BARE, timeout_s)
        if seen:
            return Connection(path, sqlite)
        sqlite.close()
    raise SteplabError(f"no store at {path} yet, the file is empty; create one: `steplab run`")


def _reader(path: Path, mode: str, timeout_s: float) -> tuple[sqlite3.Connection, int]:
    sqlite = _connect(path, mode, timeout_s)
    try:
        sqlite.execute("PRAGMA query_only = ON")
        _check_origin(path, sqlite)
        return sqlite, version_of(sqlite)
    except BaseException:
        sqlite.close()
        raise


def _has_unfinished_writes(path: Path) -> bool:
    log = Path(f"{path}-wal")
    return log.exists() and log.stat().st_size > 0


def _reading_mode(path: Path) -> str:
    """SQLite's open mode for reading without leaving files.

    An open store in write-ahead mode has companions, -wal and -shm. SQLite creates them even for readers, and read-only
    connections cannot remove them.
    """
    log, shared = Path(f"{path}-wal"), Path(f"{path}-shm")
    # A writer works or was killed: its companions serve reading too, and stay.
    if log.exists() and shared.exists():
        return "mode=ro"
    # The companions are created and removed on closing; query_only prevents writing.
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return "mode=rw"
    if _has_unfinished_writes(path):
        raise SteplabError(
            f"the store {path} has unfinished writes in {log.name}, unreadable in a read-only "
            "place; copy both files to a writable folder, and pass the copy by --store"
        )
    # The store is not open elsewhere and companions are impossible: read the bare file without locks.
    return _BARE


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise SteplabError(f"the store {path} is a folder, not a file; {NAME_ANOTHER}")


def _connect(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    # as_uri escapes ? and # in paths. isolation_level=None: transactions begin explicitly.
    uri = f"{path.absolute().as_uri()}?{mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None)
    connection.text_factory = text_of  # a damaged text must not block the others
    return connection


def text_of(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _check_origin(path: Path, sqlite: sqlite3.Connection) -> None:
    if is_blank(sqlite):
        return
    if pragma(sqlite, "application_id") != APPLICATION_ID:
        raise SteplabError(f"{path} is another program's SQLite file, not a steplab store; {NAME_ANOTHER}")
    seen = version_of(sqlite)
    if seen > CURRENT_VERSION:
        raise SteplabError(
            f"the store {path} has format {seen}, newer than the {CURRENT_VERSION} this version "
            "knows, and was left unchanged; upgrade steplab"
        )
    if other := not_ours(sqlite):
        raise SteplabError(f"the store {path} contains {other}, unlike a store; refused; {MOVE_AWAY}")


def _prove_writable(sqlite: sqlite3.Connection) -> None:
    # The lock proves nothing: in write-ahead mode a read-only file grants it.
    sqlite.execute("BEGIN IMMEDIATE")
    sqlite.execute(f"PRAGMA user_version = {CURRENT_VERSION}")
    sqlite.execute("ROLLBACK")


def _use_journal(path: Path, sqlite: sqlite3.Connection, timeout_s: float) -> None:
    """Use a write-ahead log, so that readers read during writes; synchronous stays FULL, so commits survive power cuts.

    On a network file system each machine would have its own log index and damage the store
    (https://sqlite.org/wal.html), so the equally safe rollback journal is used. SQLite keeps that if a file system
    lacks support for the log. The switch, once per file, does not wait for locks.
    """
    network = network_file_system(path)
    if network and is_blank(sqlite):
        text = f"the store {path} is on a network file system ({network}); see docs/reliability.md"
        warn_caller(Remark(text))
    mode = "DELETE" if network else "WAL"
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            sqlite.execute(f"PRAGMA journal_mode = {mode}")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
