"""Measure a study, each measurement in new processes."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from steplab.errors import SteplabError, UserError
from steplab.lab.attention import attention_study, measure_attention
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.comm import comm_study, measure_comm
from steplab.lab.ddp import ddp_study, measure_ddp
from steplab.lab.keeping import NotStored, Place, checked_name, has_store, keep, open_store
from steplab.lab.machine import doctor, refuse_torchrun, visible_gpus
from steplab.lab.measuring import measure, named_fields
from steplab.lab.memory import memory
from steplab.lab.profiling import profile
from steplab.measurement.processes.launch import numerics_in_child
from steplab.measurement.progress import OnProgress, Progress
from steplab.records.codec import new_head
from steplab.records.failure import Failure
from steplab.records.numerics import Numerics
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.specs.attention import ATTENTION
from steplab.specs.benchmark import DOCTOR, Benchmark
from steplab.specs.comm import COMM
from steplab.specs.ddp import DDP
from steplab.specs.resolve import as_grid
from steplab.specs.step import StepSpec
from steplab.specs.study import Part, StudySpec, fitted, labels, load_study
from steplab.store.database import Store
from steplab.store.selection import cell_key, part_key

DEFAULT_TIMEOUT_S = 3600.0

Measure = Callable[..., Record]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyJob:
    key: str
    what: str
    measure: Measure
    """Measure and store the record. Raises SteplabError if that is impossible."""
    num_steps: int = 0
    """Warm-up and measured steps; 0: unknown."""


def jobs_of(study: StudySpec) -> list[StudyJob]:
    """The study's measurements, in order. Raises UserError for invalid options of a benchmark."""
    watched = [part for part in study.parts if part.step]
    steps = [*study.cells, *(part.step for part in watched if part.step)]
    told = dict(zip(map(cell_key, steps), labels(steps), strict=True))

    def of_step(spec: StepSpec, key: str, kind: str, measure: Callable[..., Record]) -> StudyJob:
        what = f"{kind} of {told[cell_key(spec)]}" if kind else told[cell_key(spec)]
        return StudyJob(key=key, what=what, measure=partial(measure, spec), num_steps=spec.warmup + spec.steps)

    timed = [of_step(cell, cell_key(cell), "", _time) for cell in study.cells]
    parts = [
        of_step(part.step, part_key(part), _STEPS[part.kind][0], _STEPS[part.kind][1])
        if part.step
        else _of_benchmark(part)
        for part in study.parts
    ]
    first = [job for job, part in zip(parts, study.parts, strict=True) if part.kind == "doctor"]
    return [*first, *timed, *(job for job in parts if job not in first)]


def _measured(
    kind: Callable[..., Any],
    work: Callable[..., Record],
    spec: StepSpec,
    *,
    store: Path | str | None,
    place: Place,
    **options: Any,
) -> Record:
    try:
        return work(spec, store=store, place=place, **options)
    except NotStored:
        raise
    except SteplabError as error:
        with open_store(store, write=True) as opened:
            if place.cell in opened.finished_cells(place.study_id):  # measured, and only the watched part is missing
                raise
            failure = Failure(kind="error", message=str(error))
            return keep(opened, kind(**new_head(), name=options["name"], spec=spec, failure=failure), place)


def _audit(
    spec: StepSpec, *, name: str, store: Path | str | None, place: Place, timeout_s: float, on_progress: OnProgress
) -> Numerics:
    with open_store(store, write=True) as opened:
        record = numerics_in_child(spec, timeout_s=timeout_s, on_progress=on_progress)
        return keep(opened, dataclasses.replace(record, name=name), place)


_time = partial(_measured, Run, measure)
_STEPS: dict[str, tuple[str, Measure]] = {
    "profile": ("profile", partial(_measured, Run, profile)),
    "memory": ("memory", partial(_measured, Run, memory)),
    "precision": ("audit", partial(_measured, Numerics, _audit)),
}


def _doctor(given: Mapping[str, Any]) -> Measure:
    def measure(*, name: str, **how: Any) -> Record:
        return doctor(**given, **how)

    return measure


def _comm(given: Mapping[str, Any]) -> Measure:
    study, device = comm_study(given)
    return partial(measure_comm, study, device=device)


def _ddp(given: Mapping[str, Any]) -> Measure:
    return partial(measure_ddp, ddp_study(given), traces=given.get("traces"))


_BENCHMARKS: dict[str, tuple[Benchmark[Any], Callable[[Mapping[str, Any]], Measure]]] = {
    "doctor": (DOCTOR, _doctor),
    "attention": (ATTENTION, lambda given: partial(measure_attention, attention_study(given))),
    "comm": (COMM, _comm),
    "ddp": (DDP, _ddp),
}


def _of_benchmark(part: Part) -> StudyJob:
    benchmark, measurement = _BENCHMARKS[part.kind]
    measure = measurement(benchmark.of_table(part.options))
    return StudyJob(key=part_key(part), what=benchmark.what, measure=measure)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepProgress:
    index: int
    to_run: int
    skipped: int
    what: str
    num_steps: int
    """Warm-up and measured steps; 0: unknown."""
    within: Progress | None = None
    record: Record | None = None
    """The stored record; None while measuring, or if the measurement was refused."""
    refusal: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    study_id: str
    runs: tuple[Run, ...]
    """The newest record of each timed step, also from before a resume."""
    num_measured: int
    num_failed: int
    refusals: tuple[str, ...]


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

    `fields`, each a value or a list, replace fields of every step, as the options of `steplab study` do:

        result = steplab.study("quick")
        steplab.report(study=result.study_id).save("page.html")

    Other arguments are as in `sweep`. Raises UserError for an unknown preset or a file that is not a study.
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
    """Make the study's measurements in sequence; each is stored as it ends.

        cells = steplab.study_from_grids("contexts", "", [{"model": ["tiny"], "context": [32, 64]}])
        steplab.sweep(cells).runs

    `resume` continues the newest study of the same measurements, and repeats killed and timed-out ones. A failing step
    becomes a record; the study's description lists refused benchmarks with reasons. `timeout_s` limits one measurement.
    Raises SteplabError if the store cannot be written, UserError for a study that needs more GPUs.
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
    """The measurements that `sweep` with `resume` would make."""
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
    try:
        return cell_key(choose_checkpointing(cell).spec)
    except SteplabError:  # it was refused, and the record says why
        return cell_key(cell)
