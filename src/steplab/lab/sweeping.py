"""Measure every cell of a study, each in a process of its own; an interrupted sweep can be resumed."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import SteplabError
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.processes import refuse_torchrun
from steplab.lab.utilization import with_utilizations
from steplab.measurement.processes.launch import measure_in_child
from steplab.measurement.progress import Progress
from steplab.records.codec import new_id, now_utc
from steplab.records.failure import Failure
from steplab.records.run import Run
from steplab.specs.step import StepSpec
from steplab.specs.study import StudySpec, labels
from steplab.store.cells import cell_key
from steplab.store.database import Store

DEFAULT_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepProgress:
    """Progress of a sweep."""

    cell: StepSpec
    """The cell that is running or has just ended."""
    index: int
    """Number of that cell among the cells to run, from 0."""
    to_run: int
    """Number of cells to run in this call."""
    skipped: int
    """Number of cells that a resumed sweep found finished."""
    what: str
    """What tells that cell from the others of the study, in words."""
    within: Progress | None = None
    """Progress inside the cell."""
    run: Run | None = None
    """The cell's record; None until it has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """The result of a sweep."""

    study_id: str
    """Id of the study in the store."""
    runs: tuple[Run, ...]
    """The newest record of each cell, including records of an earlier attempt."""


def sweep(
    study: StudySpec,
    *,
    store: Path | str | None = None,
    resume: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: Callable[[SweepProgress], None] = lambda progress: None,
) -> SweepResult:
    """Measure the study's cells one after the other; each is in the store as soon as it has ended.

    `resume` continues the newest sweep over the same cells: cells that were measured, ran out of memory or raised
    are not run again; cells whose process was killed or timed out are. A cell that fails is stored as a record, and the
    sweep continues. `timeout_s` is for one cell. Raises SteplabError if the store cannot be written.
    """
    refuse_torchrun("measure the whole sweep")
    checked_name(study.name)
    with open_store(store, write=True) as opened:
        study_id = opened.find_study(study) if resume else None
        study_id = study_id or opened.begin_study(study)
        finished = opened.finished_cells(study_id)
        told = dict(zip(map(cell_key, study.cells), labels(study.cells), strict=True))
        missing = [cell for cell in study.cells if cell_key(cell) not in finished]
        for index, cell in enumerate(missing):
            so_far = SweepProgress(
                cell=cell,
                index=index,
                to_run=len(missing),
                skipped=len(study.cells) - len(missing),
                what=told[cell_key(cell)],
            )

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
