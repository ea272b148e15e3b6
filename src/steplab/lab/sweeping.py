"""Measure a study, each measurement in processes of its own; an interrupted study can be resumed."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import SteplabError, UserError
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.keeping import NotStored, Place, checked_name, has_store, open_store
from steplab.lab.machine import visible_gpus
from steplab.lab.measuring import named_fields
from steplab.lab.processes import refuse_torchrun
from steplab.lab.study_parts import StudyJob, jobs_of
from steplab.measurement.progress import Progress
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.specs.step import StepSpec
from steplab.specs.study import StudySpec, as_grid, fitted, load_study
from steplab.store.cells import cell_key
from steplab.store.database import Store

DEFAULT_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepProgress:
    """Progress of a study."""

    index: int
    """Number of the measurement that is running or has just ended among those to make, from 0."""
    to_run: int
    """Number of measurements to make in this call."""
    skipped: int
    """Number of measurements that a resumed study found finished."""
    what: str
    """What tells that measurement from the others of the study, in words."""
    num_steps: int
    """Its warm-up and measured steps; 0: not known."""
    within: Progress | None = None
    """Progress inside the measurement."""
    record: Record | None = None
    """The record; None until it has ended, and for one that could not be made."""
    refusal: str = ""
    """Why the record could not be made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """The result of a study."""

    study_id: str
    """Id of the study in the store."""
    runs: tuple[Run, ...]
    """The newest record of each timed step, including records of an earlier attempt."""
    num_measured: int
    """Number of measurements, including those of an earlier attempt."""
    num_failed: int
    """Number of measurements that failed, or could not be made."""
    refusals: tuple[str, ...]
    """Measurements that could not be made, each with the reason."""


def study(
    study: StudySpec | Path | str,
    *,
    name: str | None = None,
    store: Path | str | None = None,
    resume: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: Callable[[SweepProgress], None] = lambda progress: None,
    **fields: object,
) -> SweepResult:
    """Run a preset or a TOML file of measurements, as `steplab study` does; every record is stored.

    `fields` replace those of every step in it, each a value or a list, as the options of `steplab study` do:

        result = steplab.study("quick")
        steplab.report(study=result.study_id).save("page.html")

    Otherwise as `sweep`. Raises UserError for an unknown preset or a file that is not a study.
    """
    if isinstance(study, StudySpec):
        if fields:
            raise UserError(f"study takes either a StudySpec or fields, not both; leave out {', '.join(fields)}")
        asked = study
    else:
        asked = load_study(str(study), as_grid(named_fields(None, fields)))
    asked = asked if name is None else dataclasses.replace(asked, name=name)
    return sweep(asked, store=store, resume=resume, timeout_s=timeout_s, on_progress=on_progress)


def sweep(
    study: StudySpec,
    *,
    store: Path | str | None = None,
    resume: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: Callable[[SweepProgress], None] = lambda progress: None,
) -> SweepResult:
    """Make the study's measurements one after the other; each is in the store as soon as it has ended.

        cells = steplab.study_from_grids("contexts", "", [{"model": ["tiny"], "context": [32, 64]}])
        steplab.sweep(cells).runs

    `resume` continues the newest study over the same measurements: those that were made, ran out of memory or raised
    are not repeated; those whose process was killed or timed out are. A step that fails is stored as a record, and the
    study continues; why a benchmark could not be made stands in the study's description. `timeout_s` is for one
    measurement. Raises SteplabError if the store cannot be written, UserError for a study that needs more GPUs.
    """
    refuse_torchrun("measure the whole study")
    checked_name(study.name)
    study = fitted(study, visible_gpus())
    jobs = jobs_of(study)
    with open_store(store, write=True) as opened:
        study_id = opened.find_study(study) if resume else None
        study_id = study_id or opened.begin_study(study)
        finished = opened.finished_cells(study_id)
        missing = [job for job in jobs if job.key not in finished]
        refusals: list[str] = []
        for index, job in enumerate(missing):
            so_far = SweepProgress(
                index=index,
                to_run=len(missing),
                skipped=len(jobs) - len(missing),
                what=job.what,
                num_steps=job.num_steps,
            )

            def tell(within: Progress, so_far: SweepProgress = so_far) -> None:
                on_progress(dataclasses.replace(so_far, within=within))

            try:
                record = job.measure(
                    name=study.name,
                    store=store,
                    place=Place(study_id=study_id, cell=job.key),
                    timeout_s=timeout_s,
                    on_progress=tell,
                )
            except NotStored:  # nor would it take the next record
                raise
            except SteplabError as error:
                refusals.append(f"{job.what}: {error}")
                on_progress(dataclasses.replace(so_far, refusal=str(error)))
            else:
                on_progress(dataclasses.replace(so_far, record=record))
        said = "; ".join(filter(None, (study.description, *(f"not measured: {why}" for why in refusals))))
        opened.describe_study(study_id, said)
        return _result(opened, study, study_id, len(jobs), refusals)


def missing_jobs(study: StudySpec, *, store: Path | str | None = None) -> list[StudyJob]:
    """The measurements that `sweep` with `resume` would make of this study."""
    study, finished = fitted(study, visible_gpus()), set[str]()
    if has_store(store):
        with open_store(store, write=False) as opened:
            study_id = opened.find_study(study)
            finished = opened.finished_cells(study_id) if study_id else set()
    return [job for job in jobs_of(study) if job.key not in finished]


def _result(store: Store, study: StudySpec, study_id: str, num_jobs: int, refusals: list[str]) -> SweepResult:
    records = list(store.iterate(study=study_id))
    by_cell = {cell_key(record.spec): record for record in records if isinstance(record, Run) and record.spec}
    return SweepResult(
        study_id=study_id,
        runs=tuple(by_cell[key] for key in map(_key_of_record, study.cells) if key in by_cell),
        num_measured=num_jobs,
        num_failed=sum(record.status != "ok" for record in records) + len(refusals),
        refusals=tuple(refusals),
    )


def _key_of_record(cell: StepSpec) -> str:
    """The key of the step that a cell's record is of: where the cell leaves a choice, that with what was chosen."""
    try:
        return cell_key(choose_checkpointing(cell).spec)
    except SteplabError:  # it was refused, and the record says why
        return cell_key(cell)
