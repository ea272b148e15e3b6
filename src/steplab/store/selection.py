"""The records that a reader asks for: as an SQL condition, or by an id, a unique name, or first digits, as git does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from steplab.errors import UserError
from steplab.store.connection import Connection
from steplab.units import counted

FINISHED = "('ok', 'out_of_memory', 'error')"
"""The statuses of an attempt that stands. A cell that crashed or timed out may go better next time."""
NOT_SUPERSEDED = f"""NOT EXISTS (
    SELECT 1 FROM record AS newer
    WHERE newer.study = record.study AND newer.cell = record.cell AND newer.kind = record.kind
    AND (newer.status IN {FINISHED}, newer.created_utc, newer.seq)
        > (record.status IN {FINISHED}, record.created_utc, record.seq)
)"""
"""True for the last attempt at a cell, and for every record outside of a study.

One that stands is never hidden by one that crashed or timed out: attempts end with the first that stands, so that the
other can be the newer only by a clock that was set back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The values that a record must match; None does not restrict."""

    kind: str | None = None
    """The record's kind: run, ceilings, ..."""
    study: str | None = None
    """The id of the record's study."""
    name: str | None = None
    """The name that the user gave."""
    status: str | None = None
    """The record's status: ok, or the kind of a failure."""
    outside_studies: bool = False
    """Whether the record must belong to no study."""
    all_attempts: bool = False
    """Whether attempts count that a newer attempt at the same cell has superseded."""

    def condition(self) -> str:
        """The condition behind WHERE, with a placeholder for each of `values`."""
        conditions = [f"{column} = ?" for column, _ in self._given()]
        if self.outside_studies:
            conditions.append("study IS NULL")
        return " AND ".join([*conditions, "TRUE" if self.all_attempts else NOT_SUPERSEDED])

    def values(self) -> list[str]:
        """The values of the placeholders."""
        return [value for _, value in self._given()]

    def _given(self) -> list[tuple[str, str]]:
        columns = (("kind", self.kind), ("study", self.study), ("name", self.name), ("status", self.status))
        return [(column, value) for column, value in columns if value is not None]


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
