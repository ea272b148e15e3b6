"""Studies in the store: the cells that a sweep set out to measure, so that it can be resumed."""

import msgspec

from steplab.records.codec import new_id, now_utc
from steplab.records.rows import Row
from steplab.specs.study import StudySpec
from steplab.store.cells import fingerprint_of_format_1, study_fingerprint, study_keys
from steplab.store.connection import Connection, text_of
from steplab.store.selection import FINISHED, NOT_SUPERSEDED


def begin_study(connection: Connection, study: StudySpec) -> str:
    """Store the cells that the study will measure; returns its new id."""
    study_id = new_id()
    cells = study_keys(study)
    with connection.transaction():
        connection.query(
            "INSERT INTO study (id, name, description, created_utc, fingerprint, num_cells, cells)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            study_id,
            study.name,
            study.description,
            now_utc(),
            study_fingerprint(study),
            len(cells),
            msgspec.json.encode(cells).decode(),
        )
    return study_id


def find_study(connection: Connection, study: StudySpec) -> str | None:
    """Id of the newest study with the same cells, also of one that was begun in a store of format 1."""
    found = connection.query(
        "SELECT id FROM study WHERE fingerprint IN (?, ?) ORDER BY created_utc DESC, seq DESC LIMIT 1",
        study_fingerprint(study),
        fingerprint_of_format_1(study),
    )
    return str(found[0][0]) if found else None


def latest_study(connection: Connection) -> str | None:
    """Id of the newest study."""
    found = connection.query("SELECT id FROM study ORDER BY created_utc DESC, seq DESC LIMIT 1")
    return str(found[0][0]) if found else None


def finished_cells(connection: Connection, study_id: str) -> set[str]:
    """Keys of the study's measurements that need no further attempt."""
    found = connection.query(
        "SELECT DISTINCT cell FROM record"
        f" WHERE study = ? AND (kind = 'run' OR instr(cell, ':')) AND status IN {FINISHED}",
        study_id,
    )
    return {str(row[0]) for row in found if row[0] is not None}


def cells_in_order(connection: Connection, study_id: str) -> dict[str, int]:
    """The place of each record in the study's list of measurements, by its id; of others after all of them."""
    listed = connection.query("SELECT cells FROM study WHERE id = ?", study_id)
    try:
        keys = msgspec.json.decode(listed[0][0], type=list[str]) if listed and listed[0][0] else []
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError):  # damaged: the order in which they were made is left
        keys = []
    places = {key: place for place, key in enumerate(keys)}
    found = connection.query("SELECT id, cell FROM record WHERE study = ?", study_id)
    return {str(record_id): places.get(cell, len(places)) for record_id, cell in found}


def describe_study(connection: Connection, study_id: str, description: str) -> None:
    """Give the study another description."""
    with connection.transaction():
        connection.query("UPDATE study SET description = ? WHERE id = ?", description, study_id)


def study_rows(connection: Connection) -> list[Row]:
    """Each study with how many cells succeeded and how many failed at the last attempt, newest first."""
    columns = ("id", "created_utc", "name", "description", "num_cells", "num_ok", "num_failed")
    found = connection.query(
        f"""
        SELECT study.id, study.created_utc, study.name, study.description, study.num_cells,
               COUNT(*) FILTER (WHERE record.status = 'ok'), COUNT(*) FILTER (WHERE record.status != 'ok')
        FROM study LEFT JOIN record ON record.study = study.id
            AND (record.kind = 'run' OR instr(record.cell, ':')) AND {NOT_SUPERSEDED}
        GROUP BY study.seq ORDER BY study.created_utc DESC, study.seq DESC
        """
    )
    num_texts = columns.index("num_cells")
    return [dict(zip(columns, (*map(text_of, row[:num_texts]), *row[num_texts:]), strict=True)) for row in found]
