"""The measurements of a study: each one job, with its key in the store and what it is called."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from steplab import __version__
from steplab.errors import SteplabError, UserError
from steplab.lab.attention import attention_study, measure_attention
from steplab.lab.comm import comm_study, measure_comm
from steplab.lab.ddp import ddp_step, ddp_study, measure_ddp
from steplab.lab.keeping import NotStored, Place, keep, open_store
from steplab.lab.machine import doctor
from steplab.lab.memory import memory
from steplab.lab.profiling import profile
from steplab.lab.utilization import with_utilizations
from steplab.measurement.processes.launch import measure_in_child, numerics_in_child
from steplab.measurement.progress import OnProgress
from steplab.records.codec import new_id, now_utc
from steplab.records.failure import Failure
from steplab.records.numerics import Numerics
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.specs.attention import PASSES
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.study import Part, StudySpec, labels
from steplab.store.cells import cell_key, part_key

Measure = Callable[..., Record]
"""Measures and stores one record; takes name, store, place, timeout_s and on_progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One measurement of a study."""

    key: str
    """Its key in the store."""
    what: str
    """What tells it from the other measurements of the study, in words."""
    measure: Measure
    """Measures it and stores the record. Raises SteplabError where that cannot be done at all."""
    num_steps: int = 0
    """Warm-up and measured steps; 0: not known."""


def jobs_of(study: StudySpec) -> list[Job]:
    """The measurements of a study in the order they are made. Raises UserError for invalid options of a benchmark."""
    watched = [part for part in study.parts if part.step]
    steps = [*study.cells, *(part.step for part in watched if part.step)]
    told = dict(zip(map(cell_key, steps), labels(steps), strict=True))

    def of_step(spec: StepSpec, key: str, kind: str, measure: Callable[..., Record]) -> Job:
        what = f"{kind} of {told[cell_key(spec)]}" if kind else told[cell_key(spec)]
        return Job(key=key, what=what, measure=partial(measure, spec), num_steps=spec.warmup + spec.steps)

    timed = [of_step(cell, cell_key(cell), "", _time) for cell in study.cells]
    parts = [
        of_step(part.step, part_key(part), _STEPS[part.kind][0], _STEPS[part.kind][1])
        if part.step
        else Job(key=part_key(part), what=_BENCHMARKS[part.kind][0], measure=_benchmark(part))
        for part in study.parts
    ]
    first = [job for job, part in zip(parts, study.parts, strict=True) if part.kind == "doctor"]
    return [*first, *timed, *(job for job in parts if job not in first)]


# --- steps ------------------------------------------------------------------------------------------------


def _time(
    spec: StepSpec, *, name: str, store: Path | str | None, place: Place, timeout_s: float, on_progress: OnProgress
) -> Run:
    """Time one step; one that is refused becomes a record as well, so that it is a row among the others."""
    with open_store(store, write=True) as opened:
        try:
            run = measure_in_child(spec, timeout_s=timeout_s, on_progress=on_progress)
        except SteplabError as error:
            run = _refused(Run, spec, error)
        return keep(opened, with_utilizations(dataclasses.replace(run, name=name), opened), place)


def _watch(
    measure: Callable[..., Run], spec: StepSpec, *, store: Path | str | None, place: Place, **options: Any
) -> Run:
    """The same for a step that is profiled or whose memory is watched."""
    try:
        return measure(spec, store=store, place=place, **options)
    except NotStored:
        raise
    except SteplabError as error:
        with open_store(store, write=True) as opened:
            if place.cell in opened.finished_cells(place.study_id):  # measured, and only what was watched is missing
                raise
            return keep(opened, dataclasses.replace(_refused(Run, spec, error), name=options["name"]), place)


def _audit(
    spec: StepSpec, *, name: str, store: Path | str | None, place: Place, timeout_s: float, on_progress: OnProgress
) -> Numerics:
    """Audit one step in its precision."""
    with open_store(store, write=True) as opened:
        try:
            record = numerics_in_child(spec, timeout_s=timeout_s, on_progress=on_progress)
        except SteplabError as error:
            record = _refused(Numerics, spec, error)
        return keep(opened, dataclasses.replace(record, name=name), place)


def _refused(kind: Callable[..., Any], spec: StepSpec, error: SteplabError) -> Any:
    failure = Failure(kind="error", message=str(error))
    return kind(id=new_id(), created_utc=now_utc(), steplab_version=__version__, spec=spec, failure=failure)


_STEPS: dict[str, tuple[str, Measure]] = {
    "profile": ("profile", partial(_watch, profile)),
    "memory": ("memory", partial(_watch, memory)),
    "precision": ("audit", _audit),
}
"""What each part of steps is called, and what measures it."""


# --- benchmarks -------------------------------------------------------------------------------------------


def _benchmark(part: Part) -> Measure:
    """What measures a benchmark with its options. Raises UserError for options that are not valid."""
    _, make, known = _BENCHMARKS[part.kind]
    for option in part.options:
        if option not in known:
            raise UserError(f"[[{part.kind}]] has no option '{option}'; choose of {', '.join(sorted(known))}")
    return make(part.options)


def _doctor(options: Mapping[str, Any]) -> Measure:
    def measure(*, name: str, **how: Any) -> Record:
        return doctor(**options, **how)

    return measure


def _attention(options: Mapping[str, Any]) -> Measure:
    own = {name: options[name] for name in ("device", "repeats", "errors", "seed") if name in options}
    lists = {name: _listed(options[name]) for name in _ATTENTION_LISTS if name in options}
    passes = _listed(options.get("pass", PASSES))
    return partial(measure_attention, attention_study(options.get("grid"), lists, passes=passes, **own))


def _comm(options: Mapping[str, Any]) -> Measure:
    own = {name: options[name] for name in ("gpus", "processes", "repeats") if name in options}
    lists = {name: _listed(options[name]) for name in _COMM_LISTS if name in options}
    study, device = comm_study(lists, **own)
    return partial(measure_comm, study, device=device)


def _ddp(options: Mapping[str, Any]) -> Measure:
    fields = {name: value for name, value in options.items() if name in FIELDS}
    step, processes = ddp_step(fields, options.get("gpus"), options.get("processes"))
    chosen: dict[str, Any] = {}
    if "contenders" in options:
        chosen["contenders"] = _listed(options["contenders"])
    if "bucket_sizes" in options:
        chosen["bucket_sizes_mb"] = tuple(map(float, _listed(options["bucket_sizes"])))
    if "transport" in options:
        chosen["transports"] = _listed(options["transport"])
    if "profiled_steps" in options:
        chosen["profiled_steps"] = options["profiled_steps"]
    return partial(measure_ddp, ddp_study(step, processes=processes, **chosen))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


_ATTENTION_LISTS = (
    *("batch", "heads", "kv_heads", "sequence", "queries", "keys"),
    *("dim", "causal", "dtype", "implementation", "compile"),
)
_COMM_LISTS = ("collective", "size", "world_size", "backend", "device", "dtype")
_BENCHMARKS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Measure], frozenset[str]]] = {
    "doctor": ("the machine's ceilings", _doctor, frozenset({"device"})),
    "attention": (
        "attention by itself",
        _attention,
        frozenset({*_ATTENTION_LISTS, "grid", "pass", "device", "repeats", "errors", "seed"}),
    ),
    "comm": ("collectives", _comm, frozenset({*_COMM_LISTS, "gpus", "processes", "repeats"})),
    "ddp": (
        "data parallelism",
        _ddp,
        frozenset({*FIELDS, "gpus", "processes", "contenders", "bucket_sizes", "transport", "profiled_steps"}),
    ),
}
"""What each benchmark is called, what makes its measurement of the options, and the options it takes: those of the
command of its name."""
