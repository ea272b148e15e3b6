"""The raw file a measurement leaves behind: it appears where it stays whole or not at all, and outlives trouble."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steplab.errors import SteplabError, UserError
from steplab.records.run import Run


@contextmanager
def folder_for(target: Path | None, what: str) -> Iterator[Path]:
    """A folder for the file under way, on the disk that it is to stay on; what is left in it goes.

    target: where the file is to stay; None: nowhere. what: trace, snapshot. Raises SteplabError, before anything is
    measured, if it could not be written there.
    """
    if target and target.is_dir():
        raise UserError(f"cannot write the {what} to {target}: it is a folder; name a file in it")
    if target and not target.parent.is_dir():
        raise SteplabError(f"cannot write {target}: there is no folder {target.parent}")
    try:
        made = tempfile.TemporaryDirectory(dir=target.parent if target else None, prefix=".steplab-")
    except OSError as error:
        raise SteplabError(f"cannot write {target or f'a {what}'}: {error.strerror}") from error
    with made as folder:
        yield Path(folder)


def unread(error: Exception, run: Run, what: str, *, kept: Path | None) -> SteplabError:
    """What to say of a raw file that was not understood; kept: where it is."""
    why = str(error) if isinstance(error, SteplabError) else f"{type(error).__name__}: {error}"
    where = f"the {what} is in {kept}" if kept else f"no folder would take the {what}"
    return SteplabError(f"the {what} could not be read: {why}; {where}, the timing in record {run.id}")


def rescue(written: Path, what: str, run_id: str) -> Path | None:
    """Move a file out of the folder that is about to go; None if nothing takes it."""
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        try:
            return Path(shutil.move(written, folder / f"steplab-{what}-{run_id}{written.suffix}"))
        except OSError:
            continue  # the next folder may be on another disk
    return None
