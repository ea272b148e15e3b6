"""Check predictions of time and memory against the runs of a store."""

from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.measurement.progress import OnProgress, Progress
from steplab.plan.check import check_runs
from steplab.records.run import Run
from steplab.records.time_check import TimeCheck


def check_plan(store: Path | None = None, on_progress: OnProgress = lambda progress: None) -> list[TimeCheck]:
    """Every run of the store beside its prediction. Raises UserError where there is nothing to check."""

    def tell(done: int, total: int) -> None:
        on_progress(Progress(stage="predict", done=done, total=total))

    tell(0, 0)
    with open_store(store, write=False) as opened:
        runs = [record for record in opened.iterate(kind="run") if isinstance(record, Run)]
    found = check_runs(runs, tell)
    if not found:
        raise UserError("the store has no measured step on a GPU; import some with `steplab import`")
    return found
