"""The step from format 1 of a store to 2: a cell's key no longer counts fields that have their default."""

import sqlite3

import msgspec

from steplab.errors import SteplabError
from steplab.specs.step import StepSpec
from steplab.store.cells import cell_key


class _Body(msgspec.Struct):
    """What is needed of a record; the samples are passed over."""

    spec: StepSpec | None = None


def rekey_cells(sqlite: sqlite3.Connection) -> None:
    """Give each record of a study the key that its cell has now; the caller holds the transaction.

    Bodies are read and left as they are. A record that cannot be read keeps its key: its cell counts as not measured.
    """
    found = sqlite.execute("SELECT seq, body FROM record WHERE cell IS NOT NULL")
    keys = [(cell_key(spec), seq) for seq, body in found if (spec := _spec(body))]
    sqlite.executemany("UPDATE record SET cell = ? WHERE seq = ?", keys)


def _spec(body: bytes) -> StepSpec | None:
    try:
        return msgspec.json.decode(body, type=_Body).spec
    except (msgspec.DecodeError, UnicodeDecodeError, SteplabError):
        return None
