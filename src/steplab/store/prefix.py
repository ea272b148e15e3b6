"""Finding an id by its first digits, as git does."""

from typing import Literal

from steplab.errors import UserError
from steplab.store.connection import Connection

_NUM_SHOWN = 5


def unique_id(connection: Connection, table: Literal["record", "study"], prefix: str) -> str:
    """The one id in `table` that begins with `prefix`.

    A whole id is itself, even where longer ones begin with it.
    Raises UserError if there is none, or more than one.
    """
    # No character sorts behind the last code point, so the range is exactly the ids with this prefix.
    found = connection.query(
        f"SELECT id FROM {table} WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
        prefix,
        f"{prefix}\U0010ffff",
        _NUM_SHOWN + 1,
    )
    ids = [str(row[0]) for row in found]
    if prefix and ids and (len(ids) == 1 or ids[0] == prefix):
        return ids[0]
    if not prefix or not ids:
        raise UserError(f"no {table} '{prefix}' in {connection.path}; `steplab list` shows what there is")
    shown = ", ".join(ids[:_NUM_SHOWN]) + (", …" if len(ids) > _NUM_SHOWN else "")
    raise UserError(f"'{prefix}' is the beginning of more than one {table}: {shown}; give more digits")
