"""Take a memory snapshot that anyone made into a record."""

import dataclasses
from pathlib import Path

from steplab.lab.keeping import imported_run, keep, open_store
from steplab.lab.memory_reading import read_memory
from steplab.measurement.progress import OnProgress
from steplab.records.run import Run


def import_snapshot(
    path: Path | str,
    *,
    name: str | None = None,
    store: Path | str | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Run:
    """Store what a memory snapshot tells: a pickle of torch.cuda.memory._dump_snapshot's, or that
    compressed by gzip or xz.

    Nothing in the file is executed: only containers, texts and numbers are admitted. `name` is the file's by default.
    The record has a memory profile and nothing else. Where the marks that `memory` keeps lie beside the file
    (step.pickle, step.marks.json), it says whose everything is, as the measured record does; else its categories are
    what was there before the history begins and what came since, for a snapshot does not say. Raises UserError for a
    file that cannot be read or is no snapshot, SteplabError for one that holds no allocation.
    """
    path = Path(path)
    with open_store(store, write=True) as opened:
        run = dataclasses.replace(
            imported_run(path, name),
            memory_profile=read_memory(path, on_progress, file=path.name),
            notes=("timing: an imported snapshot tells of memory alone",),
        )
        keep(opened, run)
        return run
