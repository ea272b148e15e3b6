"""Turns each exception of SQLite into a line that names the fix."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steplab.errors import SteplabError, UserError

MOVE_AWAY = "move it away, and `steplab import` an export of it, if there is one, into a new store"
NAME_ANOTHER = "name another store with --store or STEPLAB_STORE"
RECOVER = "`sqlite3 {path} .recover | sqlite3 new.db` saves what can be read into a new store"
_LOCKED = "another process keeps the store {path} locked; wait for it or end it, then try again"

_MESSAGES: dict[int, str] = {
    sqlite3.SQLITE_NOTADB: f"{{path}} is not a steplab store, it is not even an SQLite file; {MOVE_AWAY}",
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
    f"the file system of the store {{path}} has no working locks ({{error}}), as some network folders; "
    f"{NAME_ANOTHER}, on a local disk"
)
_OF_LOCKS = {
    *(sqlite3.SQLITE_IOERR_LOCK, sqlite3.SQLITE_IOERR_UNLOCK, sqlite3.SQLITE_IOERR_RDLOCK, sqlite3.SQLITE_PROTOCOL),
    *(sqlite3.SQLITE_IOERR_SHMLOCK, sqlite3.SQLITE_IOERR_SHMMAP, sqlite3.SQLITE_IOERR_SHMOPEN),
    sqlite3.SQLITE_IOERR_CHECKRESERVEDLOCK,
}
_OTHER = f"the store {{path}} failed ({{error}}); if that repeats, {MOVE_AWAY}"


def not_writable(path: Path) -> str:
    """The message for a store that cannot be written."""
    return _MESSAGES[sqlite3.SQLITE_READONLY].format(path=path)


def locked(path: Path) -> str:
    """The message for a store that another process keeps locked."""
    return _LOCKED.format(path=path)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file's content is the cause, and not a lock or the disk."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Raise SteplabError, naming the store and the fix, for whatever sqlite3 or the file system raises inside."""
    try:
        yield
    except sqlite3.Error as error:
        # The low byte of an extended code is its family: SQLITE_READONLY_DIRECTORY is a SQLITE_READONLY.
        code = getattr(error, "sqlite_errorcode", 0)
        message = _NO_LOCKS if code in _OF_LOCKS else _MESSAGES.get(code & 0xFF, _OTHER)
        raise SteplabError(message.format(path=path, error=error)) from error
    except OSError as error:
        raise SteplabError(f"cannot open the store {path}: {error.strerror}; {NAME_ANOTHER}") from error
    except UnicodeDecodeError as error:  # a name in the file, or SQLite's message about it
        raise SteplabError(_MESSAGES[sqlite3.SQLITE_CORRUPT].format(path=path, error=error)) from error
    except (UnicodeEncodeError, OverflowError) as error:
        raise UserError(
            f"a text or number that was given can neither be stored nor found in the store {path} ({error}); use valid "
            "text, and whole numbers below 2^63"
        ) from error
