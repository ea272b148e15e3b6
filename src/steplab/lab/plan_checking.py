"""Check predictions of time and memory against the runs of a store and against published steps."""

from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.measurement.progress import OnProgress, Progress
from steplab.plan.check import check_rows, check_runs
from steplab.plan.public import PublicRow, read_rows
from steplab.records.run import Run
from steplab.records.time_check import TimeCheck
from steplab.unpacking import small_file


def check_plan(
    store: Path | None = None, table: Path | None = None, on_progress: OnProgress = lambda progress: None
) -> list[TimeCheck]:
    """Every run of the store, or every row of a table of published steps, beside its prediction.

    table: JSON as benchmarks/public_training.json.xz, plain or compressed. Raises UserError where there is nothing to
    check, or the table cannot be read.
    """

    def tell(done: int, total: int) -> None:
        on_progress(Progress(stage="predict", done=done, total=total))

    tell(0, 0)
    if table is not None:
        return check_rows(read_table(table))
    with open_store(store, write=False) as opened:
        runs = [record for record in opened.iterate(kind="run") if isinstance(record, Run)]
    found = check_runs(runs, tell)
    if not found:
        raise UserError("the store has no measured step on a GPU; import some with `steplab import`, or give --table")
    return found


def read_table(path: Path) -> list[PublicRow]:
    """The rows of a table of published steps. Raises UserError for a file that is none."""
    try:
        return read_rows(small_file(path), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
