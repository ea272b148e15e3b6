import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from steplab.errors import LeftOut, SteplabError, warn_caller
from steplab.records.ceilings import Ceilings
from steplab.records.codec import decode, encode
from steplab.records.record import Record
from steplab.records.registry import KINDS, kind_of, summary_row
from steplab.records.rows import Row
from steplab.records.validation import check
from steplab.store.connection import Connection, text_of
from steplab.store.selection import Selection, cell_key, id_beginning, unique_id

_ROWS = msgspec.json.Decoder(Row)
_DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)
_BESIDE = ("id", "created_utc", "kind", "name", "status")
"""Fields of a row that the table stores in columns as well, so they stay right if the summary is damaged."""
_COLUMNS = f"{', '.join(_BESIDE)}, summary"
_NEWEST_FIRST = "ORDER BY created_utc DESC, seq DESC"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignRecord:
    where: str
    """Origin in messages, such as "runs.jsonl, line 3"."""
    body: bytes

    @property
    def record(self) -> Record:
        """Decoded at each access, because thousands of waiting records are kept as JSON."""
        return decode(self.body)


def read_foreign(where: str, line: bytes) -> ForeignRecord:
    """Check one line of JSON from another store.

    Raises SteplabError, beginning with `where`, for anything that steplab cannot have written.
    """
    try:
        check(decode(line))
    except SteplabError as error:
        raise SteplabError(f"{where}: {error}") from error
    return ForeignRecord(where=where, body=line.strip())


class RecordTable:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, record: Record, *, cell: str | None = None) -> None:
        """Store a record, on disk at return; repeating has no effect.

        `cell` is the key of a study's measured cell; None: the key of the record's spec. Raises SteplabError if another
        record has its id.
        """
        with self._connection.transaction():
            _insert(self._connection, record, encode(record), cell)

    def import_records(self, records: Sequence[ForeignRecord]) -> tuple[int, int]:
        """Store records of `read_foreign`, all or none. Returns the numbers of added and of existing records."""
        num_added = 0
        with self._connection.transaction():
            for foreign in records:
                try:
                    num_added += _insert(self._connection, foreign.record, foreign.body, None)
                except SteplabError as error:
                    raise SteplabError(f"{foreign.where}: {error}; nothing was imported") from error
        return num_added, len(records) - num_added

    def get(self, id_prefix: str) -> Record:
        """The record with this id, name or beginning of an id. Raises UserError for none or several."""
        record_id = unique_id(self._connection, "record", id_prefix)
        body = _only(self._connection, "SELECT body FROM record WHERE id = ?", record_id)[0]
        return _decode(self._connection, record_id, body)

    def id_beginning(self, prefix: str) -> str | None:
        """The only id with this beginning; names do not count. None without one. Raises UserError for several."""
        return id_beginning(self._connection, "record", prefix)

    def find(self, record_id: str) -> Record | None:
        try:
            return self.get(record_id)
        except SteplabError as error:
            _leave_out(error)
            return None

    def records(self, id_prefixes: Iterable[str]) -> list[Record]:
        """Records with these ids, names or beginnings, in order and without duplicates. Raises as `get`."""
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
        """One flat row of figures per record, newest first, without decoding records. Arguments that are None select
        all.

        Figures are as in the command line's JSON and CSV: base units, None if absent. Columns are of the version that
        stored the record, so read a row's values with `get`. A damaged row warns by LeftOut.
        """
        selection = Selection(kind=kind, study=study, name=name, status=status, all_attempts=all_attempts)
        return list(_rows(self._connection, selection, limit))

    def each_row(self, *, study: str | None = None, name: str | None = None) -> Iterator[Row]:
        """Yield the rows of all kinds one at a time, because 100,000 rows take 620 MiB."""
        return _rows(self._connection, Selection(study=study, name=name), None)

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
        """Yield whole records, oldest first. Arguments that are None select all.

        `newest`: only this number of newest records. Unreadable ones are skipped with a LeftOut warning.
        """
        selection = Selection(
            kind=kind, study=study, name=name, all_attempts=all_attempts, outside_studies=outside_studies
        )
        condition, values = selection.where()
        if newest is not None:
            condition = f"seq IN (SELECT seq FROM record WHERE {condition} {_NEWEST_FIRST} LIMIT ?)"
            values.append(newest)
        sql = f"SELECT id, body FROM record WHERE {condition} ORDER BY created_utc, seq"
        for record_id, body in self._connection.stream(sql, *values):
            try:
                record = _decode(self._connection, record_id, body)
            except SteplabError as error:
                _leave_out(error)
            else:
                yield record

    def of_unknown_kind(self) -> list[tuple[str, str]]:
        # kinds come from an index, without reading records
        if all(kind in KINDS for (kind,) in self._connection.query("SELECT DISTINCT kind FROM record")):
            return []
        marks = ", ".join("?" * len(KINDS))
        found = self._connection.query(f"SELECT id, kind FROM record WHERE kind NOT IN ({marks}) ORDER BY seq", *KINDS)
        return [(text_of(record_id), text_of(kind)) for record_id, kind in found]

    def identify(self, id_prefixes: Iterable[str]) -> list[Row]:
        """Id, kind, created_utc, name, status and study of each record, without decoding it. Raises as `get`."""
        columns = ("id", "kind", "created_utc", "name", "status", "study")
        ids = dict.fromkeys(unique_id(self._connection, "record", prefix) for prefix in id_prefixes)
        sql = f"SELECT {', '.join(columns)} FROM record WHERE id = ?"
        found = [_only(self._connection, sql, record_id) for record_id in ids]
        return [
            dict(zip(columns, (None if value is None else text_of(value) for value in row), strict=True))
            for row in found
        ]

    def annotate(self, id_prefix: str, change: Callable[[Record], dict[str, object]]) -> Record:
        """Change tags or comment of a record to the fields that `change` returns.

        Raises as `get` and `change`.
        """
        with self._connection.transaction():
            record_id = unique_id(self._connection, "record", id_prefix)
            body = _only(self._connection, "SELECT body FROM record WHERE id = ?", record_id)[0]
            changes = change(_decode(self._connection, record_id, body))  # refuses a damaged one
            fields = msgspec.json.decode(body)  # with fields of later versions
            changed = msgspec.json.encode(fields | changes)
            record = _decode(self._connection, record_id, changed)
            row = encode(summary_row(record))
            self._connection.query("UPDATE record SET body = ?, summary = ? WHERE id = ?", changed, row, record_id)
        return record

    def remove(self, ids: Iterable[str]) -> list[str]:
        """Remove records by whole ids, all or none; unreadable ones too.

        A study is removed with its last record. Returns the ids of removed studies.
        """
        emptied = dict[str, None]()
        with self._connection.transaction():
            for record_id in ids:
                gone = self._connection.query("DELETE FROM record WHERE id = ? RETURNING study", record_id)
                emptied |= {study: None for (study,) in gone if study is not None}
            return [study for study in emptied if _remove_empty(self._connection, study)]

    def ceilings(self, device_name: str) -> list[Ceilings]:
        of_device = [row for row in self.rows(kind="ceilings") if row.get("device") == device_name]
        found = (self.find(str(row["id"])) for row in of_device)
        return [record for record in found if isinstance(record, Ceilings)]


def _rows(connection: Connection, selection: Selection, limit: int | None) -> Iterator[Row]:
    condition, values = selection.where()
    sql = f"SELECT {_COLUMNS} FROM record WHERE {condition} {_NEWEST_FIRST} LIMIT ?"
    found = connection.stream(sql, *values, -1 if limit is None else max(0, limit))
    return (_row([text_of(value) for value in columns], summary) for *columns, summary in found)


def _row(columns: Sequence[str], summary: bytes) -> Row:
    record_id, created_utc, kind, name, status = columns
    verb = KINDS[kind].verb if kind in KINDS else kind
    sure: Row = {"id": record_id, "created_utc": created_utc, "name": name, "status": status}
    try:
        return {"kind": verb} | _ROWS.decode(summary) | sure
    except _DAMAGE as error:
        damaged = f"the summary of record {record_id} is damaged, so its figures are missing: {error}"
        _leave_out(SteplabError(damaged))
        return {"kind": verb} | sure


def _leave_out(error: SteplabError) -> None:
    warn_caller(LeftOut(f"left out: {error}", error))


def _only(connection: Connection, sql: str, record_id: object) -> tuple[Any, ...]:
    found = connection.query(sql, record_id)
    if not found:
        raise SteplabError(
            f"record {record_id} is listed but missing in {connection.path}: the store is damaged; "
            "`steplab store check` names the repair"
        )
    return found[0]


def _remove_empty(connection: Connection, study: str) -> bool:
    unused = "NOT EXISTS (SELECT 1 FROM record WHERE record.study = study.id)"
    return bool(connection.query(f"DELETE FROM study WHERE id = ? AND {unused} RETURNING id", study))


def _insert(connection: Connection, record: Record, body: bytes, cell: str | None) -> bool:
    same_id = connection.query("SELECT body FROM record WHERE id = ?", record.id)
    if same_id:
        if same_id[0][0] == body or _measured(_decode(connection, record.id, same_id[0][0])) == _measured(record):
            return False
        raise SteplabError(
            f"{connection.path} has a different record {record.id}, which was kept; "
            "omit the new one, or import it into another --store"
        )
    study = record.sweep_id
    if study:
        cell = cell or _default_cell(record)
        sql = "INSERT OR IGNORE INTO study (id, name, description, created_utc) VALUES (?, ?, '', ?)"
        connection.query(sql, study, record.name, record.created_utc)
    row = {name: getattr(record, name) for name in ("id", "schema", "created_utc", "name", "status")}
    summary = encode(summary_row(record))
    connection.insert("record", **row, kind=kind_of(record).name, study=study, cell=cell, summary=summary, body=body)
    return True


def _default_cell(record: Record) -> str | None:
    if record.cell is None:
        return None
    parts = {"profile": "profile", "memory_profile": "memory"}
    watched = "+".join(name for field, name in parts.items() if getattr(record, field, None))
    return f"{watched}:{cell_key(record.cell)}" if watched else cell_key(record.cell)


def _measured(record: Record) -> Record:
    return dataclasses.replace(record, tags=(), comment="")


def _decode(connection: Connection, record_id: str, body: bytes) -> Record:
    try:
        return decode(body)
    except SteplabError as error:
        raise SteplabError(
            f"record {record_id} in {connection.path} is unreadable: {error}; remove it: `steplab rm {record_id}`"
        ) from error
