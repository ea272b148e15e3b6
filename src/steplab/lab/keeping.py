"""Open the store, begin the record of an imported file, and keep a measurement even if the store fails."""

import tempfile
from pathlib import Path

from steplab import __version__
from steplab.errors import SteplabError, UserError
from steplab.records.codec import encode, new_id, now_utc
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.store.database import Store
from steplab.store.location import default_path, make_data_home


def open_store(path: Path | str | None = None, *, write: bool) -> Store:
    """The store at `path`, or at the default path (store.location). Raises SteplabError as Store.open does."""
    if write and not path:
        make_data_home()
    return Store.open(Path(path) if path else default_path(), write=write)


def checked_line(what: str, text: str) -> str:
    """The text, checked. Raises UserError, which calls it `what`, if it is not one line of printable text."""
    if not text.isprintable():
        raise UserError(f"{what} must be one line of printable text, not {text!r}")
    return text


def checked_name(name: str) -> str:
    """The name of a record, checked. Raises UserError if it is not one line of printable text."""
    return checked_line("a name", name)


def imported_run(path: Path, name: str | None) -> Run:
    """An empty record for an imported file, named after the file (step.json.gz: step) unless a name is given.

    Raises UserError for a name that is not one line of printable text.
    """
    return Run(
        id=new_id(),
        created_utc=now_utc(),
        steplab_version=__version__,
        name=Path(path.name.removesuffix(".gz").removesuffix(".xz")).stem if name is None else checked_name(name),
    )


def keep(store: Store, record: Record) -> None:
    """Add a record to the store; if that fails, write it to a file.

    Raises SteplabError naming the file that holds the record, or, if nothing can be written, why.
    """
    try:
        store.add(record)
    except SteplabError as error:
        for folder in (Path.cwd(), Path(tempfile.gettempdir())):
            rescued = folder / f"steplab-unsaved-{record.id}.jsonl"
            try:
                rescued.write_bytes(encode(record) + b"\n")
            except OSError:
                continue  # the next folder may be on another disk
            raise SteplabError(f"{error}; the record is in {rescued}: `steplab import` it later") from error
        raise
