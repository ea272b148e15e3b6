"""One cell of memory_study.py, in a process of its own, as one GPU is.

python -m benchmarks.memory_cell STORE NAME FIELDS     (FIELDS: the step's, as JSON)

Its record, snapshot and marks are in STORE.cells afterwards, compressed; what was reached of them if it fails.
"""

import json
import sys
from pathlib import Path

from benchmarks.memory_cells import compress

from steplab.errors import SteplabError
from steplab.lab.memory import memory
from steplab.records.codec import encode
from steplab.records.run import Run
from steplab.store.database import Store

TIMEOUT_S = 300.0


def main(store: str, name: str, fields: str) -> None:
    folder = Path(f"{store}.cells")
    folder.mkdir(exist_ok=True)
    for stale in folder.glob(f"{name}.*"):
        stale.unlink()
    snapshot, failed = folder / f"{name}.pickle", ""
    try:
        run = memory(name=name, store=store, snapshot=snapshot, timeout_s=TIMEOUT_S, **json.loads(fields))
    except SteplabError as error:  # measured, perhaps, and not understood: the record is stored, and the files are kept
        run, failed = newest(store, name), str(error)
    if run.failure or run.memory_profile is None:
        failed = failed or (run.failure.message if run.failure else "; ".join(run.notes))
    (folder / f"{name}.run.json").write_bytes(encode(run))
    for file in list(folder.glob(f"{name}.*")):
        compress(file)
    if failed:
        sys.exit(f"{name}: {failed}")


def newest(store: str, name: str) -> Run:
    """The newest record of that name. Raises SteplabError if there is none: the cell was refused."""
    with Store.open(Path(store), write=False) as opened:
        runs = [run for run in opened.iterate(kind="run") if isinstance(run, Run) and run.name == name]
    if not runs:
        raise SteplabError(f"{name} was not measured")
    return max(runs, key=lambda run: run.created_utc)


if __name__ == "__main__":
    main(*sys.argv[1:])
