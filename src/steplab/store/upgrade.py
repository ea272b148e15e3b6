"""From format 1 of a store to 2: keys do not count fields that have their default, and rows have every field."""

import sqlite3

from steplab.errors import SteplabError
from steplab.records.codec import decode, encode
from steplab.records.record import Record
from steplab.records.registry import summary_row
from steplab.store.cells import cell_key


def to_format_2(sqlite: sqlite3.Connection) -> None:
    """Give cells of studies the keys, and runs the rows, that they have now; the caller holds the transaction.

    Bodies are read and left as they are. A record that cannot be read keeps its key and its row: its cell counts as not
    measured.
    """
    found = sqlite.execute("SELECT seq, cell, body FROM record WHERE kind = 'run' OR cell IS NOT NULL")
    changed = [(*_made_again(record, cell), seq) for seq, cell, body in found if (record := _record(body))]
    sqlite.executemany("UPDATE record SET cell = ?, summary = ? WHERE seq = ?", changed)


def _made_again(record: Record, cell: str | None) -> tuple[str | None, bytes]:
    """The key, where the record has one, and the row."""
    return cell_key(record.cell) if cell and record.cell else cell, encode(summary_row(record))


def _record(body: bytes) -> Record | None:
    try:
        return decode(body)
    except SteplabError:
        return None
