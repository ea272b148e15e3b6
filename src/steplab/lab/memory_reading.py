"""Read a memory snapshot and its marks from their files, and summarise them."""

import os.path
from pathlib import Path

from steplab.errors import SteplabError
from steplab.limits import Limits
from steplab.measurement.progress import OnProgress, Progress
from steplab.records.memory_marks import Marks
from steplab.records.memory_profile import MemoryProfile


def marks_beside(snapshot: Path) -> Path:
    """Path of a snapshot's marks: step.pickle, step.pickle.gz, step.pickle.xz -> step.marks.json."""
    return snapshot.with_name(f"{Path(snapshot.name.removesuffix('.gz').removesuffix('.xz')).stem}.marks.json")


def read_memory(
    snapshot: Path,
    on_progress: OnProgress,
    *,
    file: str | None = None,
    unwatched_peak_bytes: int | None = None,
    limits: Limits | None = None,
) -> MemoryProfile:
    """The profile of a snapshot, by owner if its marks exist; the other arguments are those of `digest`
    and of `read_snapshot`.

    Raises UserError for a file that cannot be read or is invalid, and for marks of another snapshot; SteplabError for a
    snapshot without any allocation.
    """
    from steplab.snapshots.digest import digest
    from steplab.snapshots.marks import check_same_history, read_marks
    from steplab.snapshots.reading import read_snapshot

    def tell(done_bytes: int, total_bytes: int) -> None:
        on_progress(Progress(stage="read snapshot", done=done_bytes, total=total_bytes))

    beside = marks_beside(snapshot)
    marks: Marks | None = read_marks(beside) if os.path.exists(beside) else None  # first: it is read in no time
    history = read_snapshot(snapshot, on_progress=tell, limits=limits)
    if marks:
        check_same_history(marks, history, beside)
    try:
        return digest(history, marks, file=file, unwatched_peak_bytes=unwatched_peak_bytes)
    except SteplabError as error:
        raise SteplabError(f"{snapshot}: {error}") from error
