"""Records in the store: adding, finding, listing."""

from collections.abc import Iterable, Iterator

import msgspec

from steplab.errors import SteplabError
from steplab.records.attention import AttentionRun
from steplab.records.ceilings import Ceilings
from steplab.records.codec import Record, decode, encode, kind_of
from steplab.records.comm import CommRun
from steplab.records.ddp import DdpRun
from steplab.records.numerics import Numerics
from steplab.records.rows import Row, benchmark_row, ddp_run_row, numerics_row, run_row
from steplab.records.run import Run
from steplab.store.cells import cell_key
from steplab.store.connection import Connection
from steplab.store.failures import MOVE_AWAY
from steplab.store.prefix import unique_id
from steplab.store.selection import Selection

_ROWS = msgspec.json.Decoder(Row)


def add(connection: Connection, record: Record, cell: str | None) -> None:
    """Store one record, in a transaction of its own."""
    with connection.transaction():
        _insert(connection, record, encode(record), cell)


def import_lines(connection: Connection, lines: Iterable[bytes]) -> tuple[int, int]:
    """Store a record a line, all or none; returns how many were added and how many were there already."""
    # All lines are understood before the lock is taken: nobody waits for a slow pipe or for a bad line.
    parsed = [
        (number, _parse(number, line), line.strip()) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    num_added = 0
    with connection.transaction():
        for number, record, body in parsed:
            try:
                num_added += _insert(connection, record, body, None)
            except SteplabError as error:
                raise SteplabError(f"line {number}: {error}") from error
    return num_added, len(parsed) - num_added


def get(connection: Connection, id_prefix: str) -> Record:
    """The record whose id begins with the prefix."""
    record_id = unique_id(connection, "record", id_prefix)
    body = connection.query("SELECT body FROM record WHERE id = ?", record_id)[0][0]
    return _decode(connection, record_id, body)


def rows(connection: Connection, selection: Selection, limit: int | None) -> list[Row]:
    """Flat rows of the records that match, newest first."""
    found = connection.query(
        f"SELECT summary FROM record WHERE {selection.condition()} ORDER BY created_utc DESC, seq DESC LIMIT ?",
        *selection.values(),
        -1 if limit is None else max(0, limit),
    )
    try:
        return [_ROWS.decode(summary) for (summary,) in found]
    except msgspec.DecodeError as error:
        raise SteplabError(f"the store {connection.path} has a damaged summary ({error}); {MOVE_AWAY}") from error


def iterate(connection: Connection, selection: Selection) -> Iterator[Record]:
    """The records that match, oldest first."""
    sql = f"SELECT id, body FROM record WHERE {selection.condition()} ORDER BY created_utc, seq"
    for record_id, body in connection.stream(sql, *selection.values()):
        yield _decode(connection, record_id, body)


def latest_ceilings(connection: Connection, device_name: str) -> Ceilings | None:
    """The newest ceilings measured on a device of that name."""
    return next(ceilings(connection, device_name), None)


def ceilings(connection: Connection, device_name: str) -> Iterator[Ceilings]:
    """All ceilings measured on a device of that name, newest first."""
    for row in rows(connection, Selection(kind="ceilings"), None):
        if row.get("device") == device_name:
            record = get(connection, str(row["id"]))
            if isinstance(record, Ceilings):
                yield record


def summary_row(record: Record) -> Row:
    """The flat row that stands for a record in listings."""
    if isinstance(record, Run):
        return run_row(record)
    if isinstance(record, Numerics):
        return numerics_row(record)
    if isinstance(record, (AttentionRun, CommRun)):
        return benchmark_row(record)
    if isinstance(record, DdpRun):
        return ddp_run_row(record)
    row: Row = {"id": record.id, "created_utc": record.created_utc, "device": record.environment.device.name}
    for ceiling in record.ceilings:
        unit = "flops_per_s" if ceiling.unit == "FLOP/s" else "bytes_per_s"
        row["_".join(filter(None, (ceiling.name, ceiling.dtype, unit)))] = ceiling.best_per_s
    return row


def _insert(connection: Connection, record: Record, body: bytes, cell: str | None) -> bool:
    """Write one record within the caller's transaction; False if it was there already."""
    same_id = connection.query("SELECT body FROM record WHERE id = ?", record.id)
    if same_id:
        if same_id[0][0] == body or _decode(connection, record.id, same_id[0][0]) == record:
            return False
        raise SteplabError(
            f"a different record {record.id} is already in {connection.path} and was kept; "
            "leave the new one out, or put it into another store with --store"
        )
    run = record if isinstance(record, (Run, Numerics)) else None
    study = run.study if run else None
    if run and study:
        cell = cell or (cell_key(run.spec) if run.spec else None)
        connection.query(
            "INSERT OR IGNORE INTO study (id, name, description, created_utc) VALUES (?, ?, '', ?)",
            study,
            run.name,
            run.created_utc,
        )
    connection.query(
        "INSERT INTO record (id, kind, schema, created_utc, name, study, cell, status, summary, body)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        record.id,
        kind_of(record),
        record.schema,
        record.created_utc,
        "" if isinstance(record, Ceilings) else record.name,
        study,
        cell,
        "ok" if isinstance(record, Ceilings) else record.status,
        encode(summary_row(record)),
        body,
    )
    return True


def _parse(number: int, line: bytes) -> Record:
    try:
        return decode(line)
    except SteplabError as error:
        raise SteplabError(f"line {number}: {error}; nothing was imported") from error


def _decode(connection: Connection, record_id: str, body: bytes) -> Record:
    try:
        return decode(body)
    except SteplabError as error:
        raise SteplabError(f"record {record_id} in {connection.path}: {error}") from error
