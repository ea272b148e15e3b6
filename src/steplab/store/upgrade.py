"""From format 1 of a store to 2: keys do not count fields that have their default, and rows have every field."""

import sqlite3

from steplab.errors import SteplabError
from steplab.records.codec import decode, encode
from steplab.records.numerics import Numerics
from steplab.records.record import Record
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.store.cells import cell_key


def to_format_2(sqlite: sqlite3.Connection) -> None:
    """Give each cell of a study the key that it has now, and each run its row; the caller holds the transaction.

    Bodies are read and left as they are. A record that cannot be read keeps its key and its row: its cell counts as not
    measured.
    """
    found = sqlite.execute("SELECT seq, cell, body FROM record WHERE kind = 'run' OR cell IS NOT NULL")
    changed = [(*_made_again(record, cell), seq) for seq, cell, body in found if (record := _record(body))]
    sqlite.executemany("UPDATE record SET cell = ?, summary = coalesce(?, summary) WHERE seq = ?", changed)


def _made_again(record: Record, cell: str | None) -> tuple[str | None, bytes | None]:
    """Key, where the record has one, and row, where it is a run."""
    spec = record.spec if isinstance(record, (Run, Numerics)) else None
    return cell_key(spec) if cell and spec else cell, encode(run_row(record)) if isinstance(record, Run) else None


def _record(body: bytes) -> Record | None:
    try:
        return decode(body)
    except SteplabError:
        return None
