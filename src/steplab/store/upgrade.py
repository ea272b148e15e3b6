"""Upgrades a store from one format to the next: keys of cells and rows are computed again from the records."""

import sqlite3

from steplab.errors import SteplabError
from steplab.records.codec import decode, encode
from steplab.records.record import Record
from steplab.records.registry import summary_row
from steplab.store.cells import cell_key


def to_format_2(sqlite: sqlite3.Connection) -> None:
    """Upgrade to format 2: keys leave out fields that have their default, and rows have every field.

    The caller holds the transaction. Bodies are read and not changed. A record that cannot be read keeps its key and
    its row: its cell counts as not measured.
    """
    found = sqlite.execute("SELECT seq, cell, body FROM record WHERE kind = 'run' OR cell IS NOT NULL")
    changed = [(*_made_again(record, cell), seq) for seq, cell, body in found if (record := _record(body))]
    sqlite.executemany("UPDATE record SET cell = ?, summary = ? WHERE seq = ?", changed)


def to_format_3(sqlite: sqlite3.Connection) -> None:
    """Upgrade to format 3: rows have the record's kind, software and warnings. The caller holds the transaction."""
    found = sqlite.execute("SELECT seq, body FROM record")
    rows = [(encode(summary_row(record)), seq) for seq, body in found if (record := _record(body))]
    sqlite.executemany("UPDATE record SET summary = ? WHERE seq = ?", rows)


def _made_again(record: Record, cell: str | None) -> tuple[str | None, bytes]:
    """The updated key, if the record has one, and the updated row."""
    return cell_key(record.cell) if cell and record.cell else cell, encode(summary_row(record))


def _record(body: bytes) -> Record | None:
    try:
        return decode(body)
    except SteplabError:
        return None
