"""Measure every cell of a study, each in a process of its own, and lose nothing when it is interrupted."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import SteplabError
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.processes import refuse_torchrun
from steplab.lab.utilization import with_utilizations
from steplab.measurement.launch import measure_in_child
from steplab.measurement.progress import Progress
from steplab.records.codec import new_id, now_utc
from steplab.records.failure import Failure
from steplab.records.run import Run
from steplab.specs.step import StepSpec
from steplab.specs.study import StudySpec
from steplab.store.cells import cell_key
from steplab.store.database import Store

DEFAULT_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepProgress:
    """Where a sweep stands."""

    cell: StepSpec
    """The cell under way, or just ended."""
    index: int
    """Its number among those to run now, from 0."""
    to_run: int
    """Cells to run now."""
    skipped: int
    """Cells found finished by a resumed sweep."""
    within: Progress | None = None
    """Progress inside the cell."""
    run: Run | None = None
    """The cell's record, once it has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """What a sweep has come to."""

    study_id: str
    """Identity under which the store keeps it."""
    runs: tuple[Run, ...]
    """The newest record of each cell, those of an earlier attempt included."""


def sweep(
    study: StudySpec,
    *,
    store: Path | str | None = None,
    resume: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: Callable[[SweepProgress], None] = lambda progress: None,
) -> SweepResult:
    """Measure the study's cells one after the other; each is in the store as soon as it has ended.

    resume continues the newest sweep over the same cells: those that were measured, ran out of memory or raised
    are not run again; those whose process was killed or timed out are. A cell that fails is a record, and the
    sweep goes on. `timeout_s` is for one cell. Raises SteplabError where the store cannot be written.
    """
    refuse_torchrun("measure the whole sweep")
    checked_name(study.name)
    with open_store(store, write=True) as opened:
        study_id = opened.find_study(study) if resume else None
        study_id = study_id or opened.begin_study(study)
        finished = opened.finished_cells(study_id)
        missing = [cell for cell in study.cells if cell_key(cell) not in finished]
        for index, cell in enumerate(missing):
            so_far = SweepProgress(cell=cell, index=index, to_run=len(missing), skipped=len(study.cells) - len(missing))

            def tell(within: Progress, so_far: SweepProgress = so_far) -> None:
                on_progress(dataclasses.replace(so_far, within=within))

            run = _measure_cell(cell, timeout_s, tell)
            run = dataclasses.replace(run, name=study.name, study=study_id)
            run = with_utilizations(run, opened)
            keep(opened, run)
            on_progress(dataclasses.replace(so_far, run=run))
        return SweepResult(study_id=study_id, runs=_in_order(opened, study, study_id))


def _measure_cell(cell: StepSpec, timeout_s: float, tell: Callable[[Progress], None]) -> Run:
    try:
        return measure_in_child(cell, timeout_s=timeout_s, on_progress=tell)
    except SteplabError as error:  # refused: a row among the others, so that the rest still runs
        from steplab import __version__

        failure = Failure(kind="error", message=str(error))
        return Run(id=new_id(), created_utc=now_utc(), steplab_version=__version__, spec=cell, failure=failure)


def _in_order(store: Store, study: StudySpec, study_id: str) -> tuple[Run, ...]:
    by_cell = {
        cell_key(record.spec): record
        for record in store.iterate(kind="run", study=study_id)
        if isinstance(record, Run) and record.spec
    }
    return tuple(by_cell[key] for key in map(cell_key, study.cells) if key in by_cell)
