"""Check predictions of time and memory against the runs of a store."""

from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.lab.planning import plan_steps
from steplab.measurement.progress import OnProgress, Progress
from steplab.plan.check import Predicted, check_runs
from steplab.records.run import Run
from steplab.records.time_check import TimeCheck
from steplab.specs.step import StepSpec


def check_plan(store: Path | None = None, on_progress: OnProgress = lambda progress: None) -> list[TimeCheck]:
    """Every run of the store beside its prediction. Raises UserError where there is nothing to check."""

    def tell(done: int, total: int) -> None:
        on_progress(Progress(stage="predict", done=done, total=total))

    tell(0, 0)
    with open_store(store, write=False) as opened:
        runs = [record for record in opened.iterate(kind="run") if isinstance(record, Run)]
    found = check_runs(runs, predicted, tell)
    if not found:
        raise UserError("the store has no measured step on a GPU; import some with `steplab import`")
    return found


def predicted(spec: StepSpec, gpu: str) -> Predicted:
    """As `plan steps` predicts it."""
    (planned,) = plan_steps([spec], gpu=gpu)
    if planned.time is None:
        raise UserError(next(why for why in planned.why_not if why.startswith("time")).partition(": ")[2])
    return planned.time, planned.memory.peak_bytes if planned.memory else None
