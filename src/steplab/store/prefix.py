"""Finds an id by a unique name, or by its first digits, as git does."""

from collections.abc import Sequence
from typing import Literal

from steplab.errors import UserError
from steplab.store.connection import Connection
from steplab.units import counted

_NUM_SHOWN = 5
LAST, BACK = "last", "last~"
"""The word that stands for the id of the newest record or study, and what the number of later ones follows."""


def unique_id(connection: Connection, table: Literal["record", "study"], prefix: str) -> str:
    """The id that is written so, or else has that name, or else is the only one in `table` that begins so.

    `last` is the newest id, `last~1` the one before. Of several studies with one name the newest is taken. Raises
    UserError if there is none, or more than one.
    """
    if prefix == LAST or prefix.startswith(BACK):
        return _newest(connection, table, prefix)
    if connection.query(f"SELECT 1 FROM {table} WHERE id = ?", prefix):
        return prefix
    query = f"SELECT id FROM {table} WHERE name = ? AND name != '' ORDER BY created_utc DESC, seq DESC LIMIT ?"
    called = [str(row[0]) for row in connection.query(query, prefix, _NUM_SHOWN + 1)]
    if len(called) == 1 or (called and table == "study"):
        return called[0]
    if called:
        raise UserError(
            f"'{prefix}' is the name of more than one record: {_some(called)}; give an id; `steplab report` "
            "and `steplab export` take all of a name"
        )
    found = id_beginning(connection, table, prefix)
    if found is None:
        raise UserError(f"no {table} '{prefix}' in {connection.path}; `steplab list` shows what there is")
    return found


def id_beginning(connection: Connection, table: Literal["record", "study"], prefix: str) -> str | None:
    """The only id in `table` that begins with `prefix`, a complete one before longer ones; None: none does. An empty
    prefix begins no other id. Raises UserError if more than one does."""
    # No character sorts behind the last code point, so the range is exactly the ids with this prefix.
    found = connection.query(
        f"SELECT id FROM {table} WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
        prefix,
        f"{prefix}\U0010ffff",
        _NUM_SHOWN + 1,
    )
    ids = [str(row[0]) for row in found]
    if ids and (ids[0] == prefix or (prefix and len(ids) == 1)):
        return ids[0]
    if not ids or not prefix:
        return None
    raise UserError(f"'{prefix}' is the beginning of more than one {table}: {_some(ids)}; give more digits")


def _newest(connection: Connection, table: str, text: str) -> str:
    """The id that `last` or `last~N` stands for."""
    back = text.removeprefix(BACK) if text != LAST else "0"
    if not (back.isdecimal() and back.isascii()):
        raise UserError(f"'{text}' is no {table}; write last~1 for the one before the last")
    number = int(connection.query(f"SELECT count(*) FROM {table}")[0][0])
    if not number:
        raise UserError(f"no {table} in {connection.path} yet; `steplab run` makes a record")
    if len(back) > len(str(number)) or int(back) >= number:
        raise UserError(f"'{text}' is further back than the {counted(number, table)} in {connection.path}")
    query = f"SELECT id FROM {table} ORDER BY created_utc DESC, seq DESC LIMIT 1 OFFSET ?"
    return str(connection.query(query, int(back))[0][0])


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_NUM_SHOWN]) + (", …" if len(ids) > _NUM_SHOWN else "")
