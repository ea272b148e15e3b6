"""From one format of a store to the next: keys of cells and rows are made again from the records."""

import sqlite3

from steplab.errors import SteplabError
from steplab.records.codec import decode, encode
from steplab.records.record import Record
from steplab.records.registry import summary_row
from steplab.store.cells import cell_key


def to_format_2(sqlite: sqlite3.Connection) -> None:
    """To keys that do not count fields with their default, and rows with every field; the caller holds the transaction.

    Bodies are read and left as they are. A record that cannot be read keeps its key and its row: its cell counts as not
    measured.
    """
    found = sqlite.execute("SELECT seq, cell, body FROM record WHERE kind = 'run' OR cell IS NOT NULL")
    changed = [(*_made_again(record, cell), seq) for seq, cell, body in found if (record := _record(body))]
    sqlite.executemany("UPDATE record SET cell = ?, summary = ? WHERE seq = ?", changed)


def to_format_3(sqlite: sqlite3.Connection) -> None:
    """Give all records the rows that they have now, with their kind, software and warnings, as `to_format_2` does."""
    found = sqlite.execute("SELECT seq, body FROM record")
    rows = [(encode(summary_row(record)), seq) for seq, body in found if (record := _record(body))]
    sqlite.executemany("UPDATE record SET summary = ? WHERE seq = ?", rows)


def _made_again(record: Record, cell: str | None) -> tuple[str | None, bytes]:
    """The key, where the record has one, and the row."""
    return cell_key(record.cell) if cell and record.cell else cell, encode(summary_row(record))


def _record(body: bytes) -> Record | None:
    try:
        return decode(body)
    except SteplabError:
        return None
