"""Examines the file of a store, repairs it, gives free space back, and copies it."""

import base64
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import SteplabError
from steplab.records.codec import encode
from steplab.records.store_condition import StoreCondition
from steplab.store import schema
from steplab.store.connection import aside, open_to_read, open_to_repair, open_to_write, replace_content
from steplab.store.failures import sqlite_errors
from steplab.store.file_system import network_file_system
from steplab.store.salvage import StoredRecord, stored_records

_MOST_DAMAGE = 20
"""Number of findings of SQLite's integrity check that are reported."""
_SOUND = ("ok",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """What a repair did."""

    before: Path
    """A copy of the store as it was."""
    unreadable: Path | None
    """The file with the records that cannot be read, which are no longer in the store; None if all can be."""
    num_moved: int
    """Number of records in that file."""
    has_unreachable: bool
    """Whether SQLite could not read parts of the file, so that the records there are lost."""
    num_renewed: int
    """Number of records whose row in lists was made again."""


def check(path: Path, timeout_s: float = 30.0) -> StoreCondition:
    """Read everything in the store, and change nothing. Raises SteplabError where it cannot be opened at all."""
    connection = open_to_read(path, timeout_s, though_damaged=True)
    with closing(connection), sqlite_errors(path):
        sqlite = connection.sqlite
        page_bytes, num_free = schema.pragma(sqlite, "page_size"), schema.pragma(sqlite, "freelist_count")
        damage = _damage(sqlite)
        num_records, num_outdated, has_unreachable, unreadable = 0, 0, False, []
        for stored in stored_records(sqlite):
            if stored is None:
                has_unreachable = True
            elif stored.problem:
                unreadable.append(stored.unreadable())
            else:
                num_records += 1
                num_outdated += stored.is_outdated
        return StoreCondition(
            path=str(path),
            format=schema.version(sqlite),
            size_bytes=page_bytes * schema.pragma(sqlite, "page_count"),
            free_bytes=page_bytes * num_free,
            journal=str(sqlite.execute("PRAGMA journal_mode").fetchone()[0]),
            file_system=network_file_system(path),
            num_records=num_records,
            num_studies=len(_studies(sqlite)),
            num_outdated=num_outdated,
            has_unreachable=has_unreachable,
            unreadable=tuple(unreadable),
            damage=damage,
        )


def repair(path: Path, timeout_s: float = 30.0) -> Repair:
    """Build the store anew of every record that can be read, with its row in lists made again.

    Records that cannot be read go to a file beside the store, one line of JSON each with the body in base64. The store
    as it was is copied first. Its content is then replaced in one transaction.

    Raises SteplabError if the store cannot be opened, or if another process writes to it meanwhile.
    """
    connection = open_to_repair(path, timeout_s)
    with closing(connection), sqlite_errors(path), closing(sqlite3.connect("")) as made:
        sqlite = connection.sqlite
        seen = schema.pragma(sqlite, "data_version")
        before = aside(path, "before-repair")
        connection.copy_to(before)
        made.isolation_level = None
        made.execute(f"PRAGMA page_size = {schema.pragma(sqlite, 'page_size')}")
        moved, has_unreachable, num_renewed = _fill(made, sqlite)
        lost = aside(path, "unreadable") if moved else None
        if lost is not None:
            lost.write_bytes(b"".join(_line(stored) for stored in moved))
        if schema.pragma(sqlite, "data_version") != seen:
            raise SteplabError(f"another process wrote to {path} meanwhile, and nothing was changed; repeat the repair")
        replace_content(sqlite, made, path)
    return Repair(
        before=before,
        unreadable=lost,
        num_moved=len(moved),
        has_unreachable=has_unreachable,
        num_renewed=num_renewed,
    )


def compact(path: Path, timeout_s: float = 30.0) -> tuple[int, int]:
    """Write the file anew without the space that removed records left; returns its size before and after in bytes."""
    with closing(open_to_write(path, timeout_s)) as connection:
        connection.query("PRAGMA wal_checkpoint(TRUNCATE)")
        before_bytes = path.stat().st_size
        connection.query("VACUUM")
        connection.query("PRAGMA wal_checkpoint(TRUNCATE)")
        return before_bytes, path.stat().st_size


def copy(path: Path, target: Path, timeout_s: float = 30.0) -> None:
    """Copy the store to a new file as it is at one moment; others may read and write it meanwhile."""
    with closing(open_to_read(path, timeout_s)) as connection:
        connection.copy_to(target)


def _fill(made: sqlite3.Connection, sqlite: sqlite3.Connection) -> tuple[list[StoredRecord], bool, int]:
    """Write into an empty database what can be read of a store.

    Returns the records that cannot be read, whether parts of the file cannot be read, and the number of renewed rows.
    """
    made.execute("BEGIN")
    schema.create(made, schema.version(sqlite))
    moved, ids, has_unreachable, num_renewed = list[StoredRecord](), set[bytes](), False, 0
    for study in _studies(sqlite):
        made.execute(f"INSERT OR IGNORE INTO study VALUES ({', '.join('?' * len(study))})", study)
    for stored in stored_records(sqlite):
        if stored is None:
            has_unreachable = True
        elif stored.problem or stored.renewed["id"] in ids:
            moved.append(stored)
        else:
            ids.add(stored.renewed["id"])
            num_renewed += stored.is_outdated
            _insert(made, stored)
    schema.migrate(made)
    made.execute("COMMIT")
    return moved, has_unreachable, num_renewed


def _insert(made: sqlite3.Connection, stored: StoredRecord) -> None:
    values = {name: value if name in ("summary", "body") else _text(value) for name, value in stored.renewed.items()}
    made.execute(
        f"INSERT INTO record ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", tuple(values.values())
    )
    if values["study"]:
        made.execute(
            "INSERT OR IGNORE INTO study (id, name, description, created_utc) VALUES (?, ?, '', ?)",
            (values["study"], values["name"], values["created_utc"]),
        )


def _text(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _damage(sqlite: sqlite3.Connection) -> tuple[str, ...]:
    """What SQLite's integrity check finds; empty for a sound file."""
    try:
        found = tuple(str(row[0]) for row in sqlite.execute(f"PRAGMA integrity_check({_MOST_DAMAGE})"))
    except sqlite3.DatabaseError as error:  # damage that the check itself does not survive
        return (str(error),)
    return () if found == _SOUND else found


def _line(stored: StoredRecord) -> bytes:
    body = base64.b64encode(stored.columns["body"] or b"").decode()
    known = {name: stored.text(name) for name in ("id", "kind", "created_utc", "study")}
    return encode(known | {"why": stored.problem or "another record has its id", "body_base64": body}) + b"\n"


def _studies(sqlite: sqlite3.Connection) -> list[tuple[object, ...]]:
    """The rows of the table of studies; none if it cannot be read, for records name their studies."""
    sqlite.text_factory = lambda text: text.decode(errors="replace")
    try:
        return sqlite.execute("SELECT * FROM study ORDER BY seq").fetchall()
    except sqlite3.DatabaseError:
        return []
