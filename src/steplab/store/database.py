"""The store: every record that steplab made on this machine, in one SQLite file. The entry point of this folder."""

from pathlib import Path
from types import TracebackType
from typing import Self

from steplab.store.connection import open_to_read, open_to_write
from steplab.store.location import default_path, make_data_home
from steplab.store.record_table import RecordTable
from steplab.store.study_table import StudyTable


class Store(RecordTable, StudyTable):
    """An open store. Every method raises SteplabError, with one line that names the fix, if the file cannot be used.

    Of several attempts at one cell of a study (a resumed sweep measures crashed and timed-out cells again), listings
    show the newest; `all_attempts=True` shows the others too.
    """

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
