"""Take a memory snapshot that anyone made into a record."""

from pathlib import Path

from steplab import __version__
from steplab.errors import SteplabError
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.measurement.launch import OnProgress, Progress
from steplab.records.codec import new_id, now_utc
from steplab.records.memory_profile import MemoryProfile
from steplab.records.run import Run


def import_snapshot(
    path: Path | str,
    *,
    name: str | None = None,
    store: Path | str | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Run:
    """Store what a memory snapshot tells: a pickle of torch.cuda.memory._dump_snapshot's, or that compressed by gzip.

    Nothing in the file is executed: only containers, texts and numbers are admitted. `name` is the file's by default.
    The record has a memory profile and nothing else; its categories are what was there before the history begins and
    what came since, for the file does not say whose anything is. Raises UserError for a file that cannot be read or
    is no snapshot, SteplabError for one that holds no allocation.
    """
    path = Path(path)
    with open_store(store, write=True) as opened:
        run = Run(
            id=new_id(),
            created_utc=now_utc(),
            steplab_version=__version__,
            name=Path(path.name.removesuffix(".gz")).stem if name is None else checked_name(name),
            memory_profile=_read(path, on_progress),
            notes=("timing: an imported snapshot tells of memory alone",),
        )
        keep(opened, run)
        return run


def _read(path: Path, on_progress: OnProgress) -> MemoryProfile:
    from steplab.snapshots.digest import digest
    from steplab.snapshots.reading import read_snapshot

    def tell(done_bytes: int, total_bytes: int) -> None:
        on_progress(Progress(stage="read snapshot", done=done_bytes, total=total_bytes))

    history = read_snapshot(path, on_progress=tell)
    try:
        return digest(history, None, file=path.name)
    except SteplabError as error:
        raise SteplabError(f"{path}: {error}") from error
