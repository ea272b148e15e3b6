"""Records in the store: adding, finding, listing."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import astuple

from steplab.errors import LeftOut, SteplabError, warn_caller
from steplab.records.ceilings import Ceilings
from steplab.records.codec import decode, encode
from steplab.records.record import Record
from steplab.records.registry import KINDS, kind_of, summary_row
from steplab.records.rows import Row, Scalar
from steplab.records.validation import check
from steplab.store.cells import cell_key
from steplab.store.connection import Connection, text_of
from steplab.store.selection import Selection, id_beginning, unique_id

_ROWS = msgspec.json.Decoder(Row)
_DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)
"""Errors of decoding a damaged row."""
_BESIDE = ("id", "created_utc", "kind", "name", "status")
"""Fields of a row that have columns of their own, which are right though the row is damaged."""
_SURE = ("id", "created_utc", "name", "status")
"""Those that say the same as the row; the column `kind` is that of the record, and the row says how it was made."""
_COLUMNS = f"{', '.join(_BESIDE)}, summary"
_NEWEST_FIRST = "ORDER BY created_utc DESC, seq DESC"
_MOST_NUMBERS = 500
"""Number of records that one query names; SQLite takes 999 and, since 3.32, 32,766."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignRecord:
    """A record from outside that was decoded and validated."""

    where: str
    """Its name in messages, such as "runs.jsonl, line 3"."""
    body: bytes
    """Its JSON as it came, including fields that only a later version knows."""

    @property
    def record(self) -> Record:
        """The record, decoded again: of thousands that wait for their transaction the JSON alone is kept."""
        return decode(self.body)


def read_foreign(where: str, line: bytes) -> ForeignRecord:
    """The record in a line of JSON from outside.

    Raises SteplabError, beginning with `where`, if it is not a record, or not one that steplab can have written.
    """
    try:
        check(decode(line))
    except SteplabError as error:
        raise SteplabError(f"{where}: {error}") from error
    return ForeignRecord(where=where, body=line.strip())


class RecordTable:
    """The records of an open store. Every method raises SteplabError, with one line that names the fix, if the file
    cannot be used."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, record: Record, *, cell: str | None = None) -> None:
        """Store a record; it is on disk when this returns. The same record again changes nothing.

        `cell` is the key of the study's cell it measured; by default that of the record's own spec.
        Raises SteplabError if another record has its id.
        """
        with self._connection.transaction():
            _insert(self._connection, record, encode(record), cell)

    def import_records(self, records: Sequence[ForeignRecord]) -> tuple[int, int]:
        """Store records that `read_foreign` returned, all or none.

        Returns how many were added and how many were there already.
        """
        num_added = 0
        with self._connection.transaction():
            for foreign in records:
                try:
                    num_added += _insert(self._connection, foreign.record, foreign.body, None)
                except SteplabError as error:
                    raise SteplabError(f"{foreign.where}: {error}; nothing was imported") from error
        return num_added, len(records) - num_added

    def get(self, id_prefix: str) -> Record:
        """The record whose id begins with `id_prefix`. Raises UserError if none does, or more than one."""
        record_id = unique_id(self._connection, "record", id_prefix)
        body = _only(self._connection, "SELECT body FROM record WHERE id = ?", record_id)[0]
        return _decode(self._connection, record_id, body)

    def id_beginning(self, prefix: str) -> str | None:
        """The id of the record that begins so, whatever records are called; None: none does. Raises UserError if more
        than one does."""
        return id_beginning(self._connection, "record", prefix)

    def find(self, record_id: str) -> Record | None:
        """The record with this id; None, with a LeftOut warning, if it cannot be read."""
        try:
            return self.get(record_id)
        except SteplabError as error:
            _leave_out(error)
            return None

    def records(self, id_prefixes: Iterable[str]) -> list[Record]:
        """The records with these ids, each once, in this order. Raises as `get` does."""
        return list({record.id: record for record in map(self.get, id_prefixes)}.values())

    def rows(
        self,
        *,
        kind: str | None = "run",
        study: str | None = None,
        name: str | None = None,
        status: str | None = None,
        limit: int | None = None,
        all_attempts: bool = False,
    ) -> list[Row]:
        """One flat row of figures per record, newest first, without reading any record's body; None does not restrict.

        The figures are those of the command line's JSON and CSV, in base units, an absent one None. A row has the
        columns of the version that stored the record, so read it with `get`. A LeftOut warning reports a damaged row.

        """
        selection = Selection(kind=kind, study=study, name=name, status=status, all_attempts=all_attempts)
        return list(_rows(self._connection, selection, limit))

    def rows_in_part(
        self, keys: Collection[str], *, study: str | None = None, name: str | None = None
    ) -> Iterator[Row]:
        """As `rows`, one at a time, but of each row only these fields, and `seq`, by which `rows_of` finds the row.

        It is for choosing among many records: the rows of 100,000 take 620 MiB of memory, and so much of them 50.
        """
        selection = Selection(study=study, name=name)
        # a number, because making texts of 100,000 ids takes as long as reading the figures
        columns = ["seq", *(key for key in _BESIDE if key in keys)]
        figures = [key for key in dict.fromkeys(keys) if key not in _SURE]
        sql = f"SELECT {', '.join(columns)}, {'summary' if figures else 'NULL'} FROM record"
        decode = msgspec.json.Decoder(_part_of_row(figures)).decode
        for *values, summary in self._connection.stream(
            f"{sql} WHERE {selection.condition()} {_NEWEST_FIRST}", *selection.values()
        ):
            row: Row = dict(zip(columns, values, strict=True))
            if "kind" in row:
                row["kind"] = _verb(text_of(row["kind"]))
            if figures:
                try:
                    found = decode(summary)
                except _DAMAGE as error:
                    _leave_out_figures(
                        _only(self._connection, "SELECT id FROM record WHERE seq = ?", row["seq"])[0], error
                    )
                else:
                    for key, value in zip(figures, astuple(found), strict=True):
                        if value is not msgspec.UNSET:
                            row[key] = value
            yield row

    def rows_of(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of the records with these `seq`, in this order; a record that is gone has none."""
        found = dict[int, Row]()
        for first in range(0, len(numbers), _MOST_NUMBERS):
            some = numbers[first : first + _MOST_NUMBERS]
            marks = ", ".join("?" * len(some))
            sql = f"SELECT seq, {_COLUMNS} FROM record WHERE seq IN ({marks})"
            for number, *columns, summary in self._connection.stream(sql, *some):
                found[number] = _row([text_of(value) for value in columns], summary)
        return [found[number] for number in numbers if number in found]

    def fields_of_rows(self, *, study: str | None = None, name: str | None = None) -> dict[str, dict[str, None]]:
        """The fields that rows of each kind have, in their order, by the rows' field `kind`."""
        fields = dict[str, dict[str, None]]()
        for row in _rows(self._connection, Selection(study=study, name=name), None):
            fields.setdefault(str(row["kind"]), {}).update(dict.fromkeys(row))
        return fields

    def iterate(
        self,
        *,
        kind: str | None = None,
        study: str | None = None,
        name: str | None = None,
        all_attempts: bool = False,
        outside_studies: bool = False,
        newest: int | None = None,
    ) -> Iterator[Record]:
        """Whole records, oldest first, one at a time; None does not restrict.

        `newest` is how many of the newest are taken. One that cannot be read is left out, with a LeftOut warning.
        """
        selection = Selection(
            kind=kind, study=study, name=name, all_attempts=all_attempts, outside_studies=outside_studies
        )
        sql = f"SELECT id, body FROM record WHERE {selection.condition()} ORDER BY created_utc, seq"
        values: list[object] = [*selection.values()]
        if newest is not None:
            last = f"SELECT seq FROM record WHERE {selection.condition()} ORDER BY created_utc DESC, seq DESC LIMIT ?"
            sql = f"SELECT id, body FROM record WHERE seq IN ({last}) ORDER BY created_utc, seq"
            values.append(newest)
        for record_id, body in self._connection.stream(sql, *values):
            try:
                record = _decode(self._connection, record_id, body)
            except SteplabError as error:
                _leave_out(error)
            else:
                yield record

    def of_unknown_kind(self) -> list[tuple[str, str]]:
        """Id and kind of each record of a kind that this version does not know."""
        # the kinds alone are read of an index, without a look at the records
        if all(kind in KINDS for (kind,) in self._connection.query("SELECT DISTINCT kind FROM record")):
            return []
        marks = ", ".join("?" * len(KINDS))
        found = self._connection.query(f"SELECT id, kind FROM record WHERE kind NOT IN ({marks}) ORDER BY seq", *KINDS)
        return [(text_of(record_id), text_of(kind)) for record_id, kind in found]

    def identify(self, id_prefixes: Iterable[str]) -> list[Row]:
        """Id, kind, created_utc, name, status and study of each record, without reading the record.

        Raises as `get` does.
        """
        columns = ("id", "kind", "created_utc", "name", "status", "study")
        ids = dict.fromkeys(unique_id(self._connection, "record", prefix) for prefix in id_prefixes)
        sql = f"SELECT {', '.join(columns)} FROM record WHERE id = ?"
        found = [_only(self._connection, sql, record_id) for record_id in ids]
        return [
            dict(zip(columns, (None if value is None else text_of(value) for value in row), strict=True))
            for row in found
        ]

    def annotate(self, id_prefix: str, change: Callable[[Record], dict[str, object]]) -> Record:
        """Change a record's tags or comment to those that `change` gives, by field, for the record as it is then.

        Raises as `get` and `change` do.
        """
        with self._connection.transaction():
            record_id = unique_id(self._connection, "record", id_prefix)
            body = _only(self._connection, "SELECT body FROM record WHERE id = ?", record_id)[0]
            changes = change(_decode(self._connection, record_id, body))  # a damaged one is refused
            fields = msgspec.json.decode(body)  # with those that only a later version knows
            changed = msgspec.json.encode(fields | changes)
            record = _decode(self._connection, record_id, changed)
            row = encode(summary_row(record))
            self._connection.query("UPDATE record SET body = ?, summary = ? WHERE id = ?", changed, row, record_id)
        return record

    def remove(self, ids: Iterable[str]) -> list[str]:
        """Remove records by their whole ids, whether they can be read or not, all or none.

        A study goes with its last record. Returns the ids of those that went.
        """
        emptied = dict[str, None]()
        with self._connection.transaction():
            for record_id in ids:
                gone = self._connection.query("DELETE FROM record WHERE id = ? RETURNING study", record_id)
                emptied |= {study: None for (study,) in gone if study is not None}
            return [study for study in emptied if _remove_empty(self._connection, study)]

    def ceilings(self, device_name: str) -> list[Ceilings]:
        """All ceilings that were measured on a device of that name, newest first."""
        of_device = [row for row in self.rows(kind="ceilings") if row.get("device") == device_name]
        found = (self.find(str(row["id"])) for row in of_device)
        return [record for record in found if isinstance(record, Ceilings)]


def _rows(connection: Connection, selection: Selection, limit: int | None) -> Iterator[Row]:
    """Flat rows of the records that match, newest first; for a damaged row, only the columns that the table has
    beside it."""
    found = connection.stream(
        f"SELECT {_COLUMNS} FROM record WHERE {selection.condition()} {_NEWEST_FIRST} LIMIT ?",
        *selection.values(),
        -1 if limit is None else max(0, limit),
    )
    return (_row([text_of(value) for value in columns], summary) for *columns, summary in found)


def _part_of_row(keys: Sequence[str]) -> type[msgspec.Struct]:
    """The type of a row of which only these fields are read; one that is missing is UNSET."""
    names = {f"field_{place}": key for place, key in enumerate(keys)}
    fields = [(name, Scalar | msgspec.UnsetType, msgspec.UNSET) for name in names]
    return msgspec.defstruct("PartOfRow", fields, rename=names)


def _row(columns: Sequence[str], summary: bytes) -> Row:
    """The row as it was stored; a row of an earlier version lacks its kind."""
    record_id, created_utc, kind, name, status = columns
    verb = _verb(kind)
    sure: Row = {"id": record_id, "created_utc": created_utc, "name": name, "status": status}
    try:
        return {"kind": verb} | _ROWS.decode(summary) | sure
    except _DAMAGE as error:
        _leave_out_figures(record_id, error)
        return {"kind": verb} | sure


def _verb(kind: str) -> str:
    return KINDS[kind].verb if kind in KINDS else kind


def _leave_out_figures(record_id: str, error: Exception) -> None:
    _leave_out(SteplabError(f"the summary of record {record_id} is damaged, so its figures are missing: {error}"))


def _leave_out(error: SteplabError) -> None:
    warn_caller(LeftOut(f"left out: {error}", error))


def _only(connection: Connection, sql: str, record_id: object) -> tuple[Any, ...]:
    """The row of a record that was found before. Raises SteplabError if it is not there: an index is damaged."""
    found = connection.query(sql, record_id)
    if not found:
        raise SteplabError(
            f"record {record_id} is listed in {connection.path} and not found there: the store is damaged; "
            "`steplab store check` says how to mend it"
        )
    return found[0]


def _remove_empty(connection: Connection, study: str) -> bool:
    unused = "NOT EXISTS (SELECT 1 FROM record WHERE record.study = study.id)"
    return bool(connection.query(f"DELETE FROM study WHERE id = ? AND {unused} RETURNING id", study))


def _insert(connection: Connection, record: Record, body: bytes, cell: str | None) -> bool:
    """Write one record within the caller's transaction; False if it was there already."""
    same_id = connection.query("SELECT body FROM record WHERE id = ?", record.id)
    if same_id:
        if same_id[0][0] == body or _measured(_decode(connection, record.id, same_id[0][0])) == _measured(record):
            return False
        raise SteplabError(
            f"a different record {record.id} is already in {connection.path} and was kept; "
            "leave the new one out, or put it into another store with --store"
        )
    study = record.sweep_id
    if study:
        cell = cell or _default_cell(record)
        connection.query(
            "INSERT OR IGNORE INTO study (id, name, description, created_utc) VALUES (?, ?, '', ?)",
            study,
            record.name,
            record.created_utc,
        )
    connection.query(
        "INSERT INTO record (id, kind, schema, created_utc, name, study, cell, status, summary, body)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        record.id,
        kind_of(record).name,
        record.schema,
        record.created_utc,
        record.name,
        study,
        cell,
        record.status,
        encode(summary_row(record)),
        body,
    )
    return True


def _default_cell(record: Record) -> str | None:
    """The key of a record that does not come from the study itself, but for example from an export."""
    if record.cell is None:
        return None
    watched = [
        name for name, found in (("profile", "profile"), ("memory", "memory_profile")) if getattr(record, found, None)
    ]
    return "+".join(watched) + ":" + cell_key(record.cell) if watched else cell_key(record.cell)


def _measured(record: Record) -> Record:
    """The record without the user's tags and comment, which may differ from store to store."""
    return dataclasses.replace(record, tags=(), comment="")


def _decode(connection: Connection, record_id: str, body: bytes) -> Record:
    try:
        return decode(body)
    except SteplabError as error:
        raise SteplabError(
            f"record {record_id} in {connection.path} cannot be read: {error}; `steplab rm {record_id}` removes it"
        ) from error
