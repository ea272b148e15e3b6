"""The store: every record that steplab made on this machine, in one SQLite file. The entry point of this folder."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from steplab.records.ceilings import Ceilings
from steplab.records.record import Record
from steplab.records.rows import Row
from steplab.specs.study import StudySpec
from steplab.store import record_table, study_table
from steplab.store.connection import Connection, open_to_read, open_to_write
from steplab.store.location import default_path, make_data_home
from steplab.store.prefix import unique_id
from steplab.store.record_table import ForeignRecord, read_foreign
from steplab.store.selection import Selection


class Store:
    """An open store. Every method raises SteplabError, with one line that names the fix, if the file cannot be used.

    Of several attempts at one cell of a study (a resumed sweep measures crashed and timed-out cells again), listings
    show the newest; `all_attempts=True` shows the others too.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path | str | None = None, *, write: bool = False, timeout_s: float = 30.0) -> Self:
        """Open the store at `path`, or at the default path: $STEPLAB_STORE, else in the XDG data folder.

            with steplab.Store.open() as store:
                rows = store.rows()  # pandas.DataFrame(rows) and polars.DataFrame(rows) take them as they are

        write=True creates it where there is none, upgrades an older one, and proves that it can be written: a
        measurement must not be made that cannot be stored. write=False leaves no trace, and works on a
        read-only file or folder. `timeout_s` is how long to wait for another process's lock.

        Raises SteplabError if the file is missing (write=False), not writable (write=True), damaged, locked,
        another program's, or a newer steplab's.
        """
        if write and not path:
            make_data_home()
        where = Path(path) if path else default_path()
        return cls(open_to_write(where, timeout_s) if write else open_to_read(where, timeout_s))

    @property
    def path(self) -> Path:
        """The file."""
        return self._connection.path

    def close(self) -> None:
        """Close the file; to be called once everything read from it has been used."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, record: Record, *, cell: str | None = None) -> None:
        """Store a record; it is on disk when this returns. The same record again changes nothing.

        `cell` is the key of the study's cell it measured; by default that of the record's own spec.
        Raises SteplabError if another record has its id.
        """
        record_table.add(self._connection, record, cell)

    def import_lines(self, lines: Iterable[bytes]) -> tuple[int, int]:
        """Store the record in each line of JSON, all or none; blank lines are skipped.

        Returns how many were added and how many were there already. Raises SteplabError with the number of
        the line that is no record, or not one that steplab can have written, or whose id another record has.
        """
        numbered = enumerate(lines, start=1)
        found = [read_foreign(f"line {number}", line) for number, line in numbered if line.strip()]
        return self.import_records(found)

    def import_records(self, records: Sequence[ForeignRecord]) -> tuple[int, int]:
        """Store records that `read_foreign` returned, all or none.

        Returns how many were added and how many were there already.
        """
        return record_table.import_records(self._connection, records)

    def get(self, id_prefix: str) -> Record:
        """The record whose id begins with `id_prefix`. Raises UserError if none does, or more than one."""
        return record_table.get(self._connection, id_prefix)

    def find(self, record_id: str) -> Record | None:
        """The record with this id; None, with a LeftOut warning, if it cannot be read."""
        return record_table.find(self._connection, record_id)

    def records(self, id_prefixes: Iterable[str]) -> list[Record]:
        """The records with these ids, in this order. Raises as `get` does."""
        return [self.get(prefix) for prefix in id_prefixes]

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
        return list(record_table.rows(self._connection, selection, limit))

    def rows_in_part(
        self,
        keys: Collection[str],
        *,
        kind: str | None = None,
        study: str | None = None,
        name: str | None = None,
        status: str | None = None,
    ) -> Iterator[Row]:
        """As `rows`, one at a time, but of each row only these fields, and `seq`, by which `rows_of` finds the row.

        It is for choosing among many records: the rows of 100,000 take 620 MiB of memory, and so much of them 50.
        """
        selection = Selection(kind=kind, study=study, name=name, status=status)
        return record_table.rows_in_part(self._connection, selection, keys)

    def rows_of(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of the records with these `seq`, in this order; a record that is gone has none."""
        return record_table.rows_of(self._connection, numbers)

    def fields_of_rows(self, *, study: str | None = None, name: str | None = None) -> dict[str, dict[str, None]]:
        """The fields that rows of each kind have, in their order, by the rows' field `kind`."""
        return record_table.fields_of_rows(self._connection, Selection(study=study, name=name))

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
        return record_table.iterate(self._connection, selection, newest)

    def of_unknown_kind(self) -> list[tuple[str, str]]:
        """Id and kind of each record of a kind that this version does not know."""
        return record_table.of_unknown_kind(self._connection)

    def identify(self, id_prefixes: Iterable[str]) -> list[Row]:
        """Id, kind, created_utc, name, status and study of each record, without reading the record.

        Raises as `get` does.
        """
        return record_table.identify(self._connection, id_prefixes)

    def annotate(self, record_id: str, *, tags: Sequence[str], comment: str) -> None:
        """Give the record with this whole id these tags and this comment, in place of those it has.

        Raises SteplabError if it cannot be read.
        """
        record_table.annotate(self._connection, record_id, tags=tags, comment=comment)

    def remove(self, ids: Iterable[str]) -> list[str]:
        """Remove records by their whole ids, whether they can be read or not, all or none.

        A study goes with its last record. Returns the ids of those that went.
        """
        return record_table.remove(self._connection, ids)

    def latest_ceilings(self, device_name: str) -> Ceilings | None:
        """The newest ceilings that were measured on a device of that name."""
        return record_table.latest_ceilings(self._connection, device_name)

    def ceilings(self, device_name: str) -> list[Ceilings]:
        """All ceilings that were measured on a device of that name, newest first."""
        return list(record_table.ceilings(self._connection, device_name))

    def begin_study(self, study: StudySpec) -> str:
        """Store what a sweep will measure; returns the id that its records carry as `study`."""
        return study_table.begin_study(self._connection, study)

    def cells_in_order(self, study_id: str) -> dict[str, int]:
        """The place of each of a study's records, by its id, in the order in which the study lists its measurements."""
        return study_table.cells_in_order(self._connection, study_id)

    def describe_study(self, study_id: str, description: str) -> None:
        """Give the study with this whole id another description."""
        study_table.describe_study(self._connection, study_id, description)

    def find_study(self, study: StudySpec) -> str | None:
        """Id of the newest study with the same cells; neither their order nor its name matters."""
        return study_table.find_study(self._connection, study)

    def latest_study(self) -> str | None:
        """Id of the newest study."""
        return study_table.latest_study(self._connection)

    def study_id(self, id_prefix: str) -> str:
        """The study's id that begins with `id_prefix`, or that of the newest study of this name, or of all for `last`.

        Raises UserError if there is none, or if more than one id begins so.
        """
        return unique_id(self._connection, "study", id_prefix)

    def studies(self) -> list[Row]:
        """One row per study, newest first: id, created_utc, name, description, num_cells, num_ok, num_failed.

        num_cells is None for a study whose records were imported; num_failed counts only the last attempts.
        """
        return study_table.study_rows(self._connection)

    def finished_cells(self, study_id: str) -> set[str]:
        """Keys of the cells that need no further attempt: those that went well, ran out of memory or raised.

        A cell whose process was killed or timed out is not among them.
        """
        return study_table.finished_cells(self._connection, study_id)
