"""The store: every record made on this machine, in one SQLite file. The folder's entry point."""

from pathlib import Path
from typing import Self

from steplab.store.connection import open_to_read, open_to_write
from steplab.store.location import default_path, make_data_home
from steplab.store.record_table import RecordTable
from steplab.store.study_table import StudyTable


class Store(RecordTable, StudyTable):
    """An open store. Methods raise SteplabError, one line with the fix, if the file is unusable.

    Resumed sweeps repeat crashed and timed-out cells. Listings show the newest attempt at a cell; `all_attempts=True`
    shows all.
    """

    @classmethod
    def open(cls, path: Path | str | None = None, *, write: bool = False, timeout_s: float = 30.0) -> Self:
        """Open the store at `path`, or the default: $STEPLAB_STORE, else in the XDG data folder.

            with steplab.Store.open() as store:
                rows = store.rows()  # for pandas.DataFrame(rows) and polars.DataFrame(rows)

        write=True creates a missing store, upgrades an older one and proves it writable. write=False leaves no trace
        and works on read-only files and folders. `timeout_s`: wait for another process's lock.

        Raises SteplabError for a file that is missing (write=False), not writable (write=True), damaged, locked,
        another program's, or a newer steplab's.
        """
        if write and not path:
            make_data_home()
        where = Path(path) if path else default_path()
        return cls(open_to_write(where, timeout_s) if write else open_to_read(where, timeout_s))

    @property
    def path(self) -> Path:
        return self._connection.path

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()
