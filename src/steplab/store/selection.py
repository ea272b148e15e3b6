"""Selects records by SQL condition, id or name, and computes keys that identify equal measurements."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from steplab.errors import UserError
from steplab.specs.step import STEP_FIELDS, StepSpec
from steplab.specs.study import Part, StudySpec
from steplab.store.connection import Connection
from steplab.units import counted

FINISHED = "('ok', 'out_of_memory', 'error')"
"""Statuses that need no further attempt; crashed or timed-out cells may succeed later."""
NOT_SUPERSEDED = f"""NOT EXISTS (
    SELECT 1 FROM record AS newer
    WHERE newer.study = record.study AND newer.cell = record.cell AND newer.kind = record.kind
    AND (newer.status IN {FINISHED}, newer.created_utc, newer.seq)
        > (record.status IN {FINISHED}, record.created_utc, record.seq)
)"""
"""SQL condition that is true for the last attempt at a cell, and for records outside studies.

An attempt with a status in FINISHED counts as the last, whatever its time: no sweep repeats it, but the clock may have
been set back.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    kind: str | None = None
    study: str | None = None
    name: str | None = None
    status: str | None = None
    """ok, or the kind of a failure."""
    outside_studies: bool = False
    all_attempts: bool = False

    def where(self) -> tuple[str, list[object]]:
        """SQL for WHERE, and the values of its placeholders."""
        columns = {"kind": self.kind, "study": self.study, "name": self.name, "status": self.status}
        given = {f"{column} = ?": value for column, value in columns.items() if value is not None}
        others = ["study IS NULL"] if self.outside_studies else []
        return " AND ".join([*given, *others, "TRUE" if self.all_attempts else NOT_SUPERSEDED]), [*given.values()]


_NUM_SHOWN = 5
LAST, BACK = "last", "last~"
"""Word for the newest record or study, and prefix for earlier ones: last~1 is the one before."""


def unique_id(connection: Connection, table: Literal["record", "study"], prefix: str) -> str:
    """Id of the only row in `table` with this id, else this name, else this beginning.

    `last` is the newest id, `last~1` the one before. A name of several studies means the newest. Raises UserError for
    none or several.
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
            f"'{prefix}' is the name of several records: {_some(called)}; pass an id; `steplab report` "
            "and `steplab export` take the name"
        )
    found = id_beginning(connection, table, prefix)
    if found is None:
        raise UserError(f"no {table} '{prefix}' in {connection.path}; `steplab list` shows the ids")
    return found


def id_beginning(connection: Connection, table: Literal["record", "study"], prefix: str) -> str | None:
    """The only id in `table` that begins with `prefix`, or is equal to it; None without one. An empty prefix matches
    only itself. Raises UserError for several."""
    # No character sorts behind the last code point, so the range is the ids with this prefix.
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
    raise UserError(f"'{prefix}' is the beginning of several ids: {_some(ids)}; add digits")


def _newest(connection: Connection, table: str, text: str) -> str:
    back = text.removeprefix(BACK) if text != LAST else "0"
    if not (back.isdecimal() and back.isascii()):
        raise UserError(f"'{text}' is not a {table}; last~1 is the one before the last")
    number = int(connection.query(f"SELECT count(*) FROM {table}")[0][0])
    if not number:
        raise UserError(f"no {table} in {connection.path} yet; make a record: `steplab run`")
    if len(back) > len(str(number)) or int(back) >= number:
        raise UserError(f"'{text}' exceeds the {counted(number, table)} in {connection.path}")
    query = f"SELECT id FROM {table} ORDER BY created_utc DESC, seq DESC LIMIT 1 OFFSET ?"
    return str(connection.query(query, int(back))[0][0])


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_NUM_SHOWN]) + (", …" if len(ids) > _NUM_SHOWN else "")


def cell_key(spec: StepSpec) -> str:
    """Key of a step: 16 hexadecimal digits of the SHA-256 of its fields, as canonical JSON sorted by name.

    Defaults and fields refused for the step are left out, so a new field changes no other step's key.
    """
    unused = {field.attribute for field in STEP_FIELDS if field.unused(spec)}
    return _short_hash(_json({name: value for name, value in _beyond_defaults(spec).items() if name not in unused}))


def part_key(part: Part) -> str:
    """Key of a study's further measurement: its command, with its step's key or its options' hash."""
    return f"{part.kind}:{cell_key(part.step) if part.step else _short_hash(_json(part.options))}"


def study_keys(study: StudySpec) -> list[str]:
    return [*map(cell_key, study.cells), *map(part_key, study.parts)]


def study_fingerprint(study: StudySpec) -> str:
    """Key of a study, equal for the same measurements in any order."""
    return _short_hash("\n".join(sorted(study_keys(study))).encode())


def _beyond_defaults(value: Any) -> dict[str, object]:
    pairs = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return {
        field.name: _beyond_defaults(content) if dataclasses.is_dataclass(content) else content
        for field, content in pairs
        if content != field.default
    }


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _short_hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
