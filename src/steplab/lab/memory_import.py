"""Import a memory snapshot from a file as a record."""

import dataclasses
from pathlib import Path

from steplab.lab.keeping import checked_import, imported_run, keep, open_store
from steplab.lab.memory_reading import read_memory
from steplab.limits import Limits
from steplab.measurement.progress import OnProgress
from steplab.records.run import Run


def import_snapshot(
    path: Path | str,
    *,
    name: str | None = None,
    store: Path | str | None = None,
    limits: Limits | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Run:
    """Store the memory profile of a snapshot: a pickle by torch.cuda.memory._dump_snapshot, plain or compressed by gzip
    or xz.

    Nothing in the file is executed: only containers, texts and numbers are admitted. `name` is the file's by default.
    The record has a memory profile and nothing else. If the marks that `memory` writes are in the same folder
    (step.pickle, step.marks.json), its categories are owners, as in the measured record; otherwise they are memory from
    before the history begins and memory allocated since. Raises UserError for a file that cannot be read or is not a
    snapshot or has more than the limits allow (None: the usual ones), SteplabError for one without any allocation.
    """
    path = Path(path)
    with open_store(store, write=True) as opened:
        run = dataclasses.replace(
            imported_run(path, name),
            memory_profile=read_memory(path, on_progress, file=path.name, limits=limits),
            notes=("timing: an imported snapshot has no timing",),
        )
        return keep(opened, checked_import(path, run))
