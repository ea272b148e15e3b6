"""Studies in the store: planned cells of sweeps, for resuming them."""

import msgspec

from steplab.records.codec import new_id, now_utc
from steplab.records.rows import Row
from steplab.specs.study import StudySpec
from steplab.store.connection import Connection, text_of
from steplab.store.selection import FINISHED, NOT_SUPERSEDED, study_fingerprint, study_keys, unique_id


class StudyTable:
    _connection: Connection

    def begin_study(self, study: StudySpec) -> str:
        """Store a sweep's plan; returns the study's id, which its records refer to."""
        study_id = new_id()
        cells = study_keys(study)
        with self._connection.transaction():
            self._connection.insert(
                "study",
                id=study_id,
                name=study.name,
                description=study.description,
                created_utc=now_utc(),
                fingerprint=study_fingerprint(study),
                num_cells=len(cells),
                cells=msgspec.json.encode(cells).decode(),
            )
        return study_id

    def cells_in_order(self, study_id: str) -> dict[str, int]:
        """Position of each record in the study's order of measurements, by record id."""
        listed = self._connection.query("SELECT cells FROM study WHERE id = ?", study_id)
        try:
            keys = msgspec.json.decode(listed[0][0], type=list[str]) if listed and listed[0][0] else []
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError):  # damaged: records keep their order
            keys = []
        places = {key: place for place, key in enumerate(keys)}
        found = self._connection.query("SELECT id, cell FROM record WHERE study = ?", study_id)
        return {str(record_id): places.get(cell, len(places)) for record_id, cell in found}

    def describe_study(self, study_id: str, description: str) -> None:
        with self._connection.transaction():
            self._connection.query("UPDATE study SET description = ? WHERE id = ?", description, study_id)

    def find_study(self, study: StudySpec) -> str | None:
        """Id of the newest study with the same measurements, in any order, under any name."""
        found = self._connection.query(
            "SELECT id FROM study WHERE fingerprint = ? ORDER BY created_utc DESC, seq DESC LIMIT 1",
            study_fingerprint(study),
        )
        return str(found[0][0]) if found else None

    def study_id(self, id_prefix: str) -> str:
        """Id of a study: the newest of this name, the only one whose id begins so, or `last`.

        Raises UserError for none or several ids.
        """
        return unique_id(self._connection, "study", id_prefix)

    def studies(self) -> list[Row]:
        """One row per study, newest first: id, created_utc, name, description, num_cells, num_ok, num_failed.

        num_cells is None for imported studies; counts are of last attempts.
        """
        columns = ("id", "created_utc", "name", "description", "num_cells", "num_ok", "num_failed")
        found = self._connection.query(
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

    def finished_cells(self, study_id: str) -> set[str]:
        """Keys of cells that need no further attempt: success, out of memory, or an exception. Crashed and timed-out
        cells are not among them."""
        found = self._connection.query(
            "SELECT DISTINCT cell FROM record"
            f" WHERE study = ? AND (kind = 'run' OR instr(cell, ':')) AND status IN {FINISHED}",
            study_id,
        )
        return {str(row[0]) for row in found if row[0] is not None}
