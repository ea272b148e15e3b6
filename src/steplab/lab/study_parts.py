"""The measurements of a study: each one job, with its key in the store and what it is called."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from keyword import iskeyword
from pathlib import Path
from typing import Any

import msgspec

from steplab.errors import SteplabError, UserError
from steplab.lab.attention import attention_study, measure_attention
from steplab.lab.comm import comm_study, measure_comm
from steplab.lab.ddp import ddp_study, measure_ddp
from steplab.lab.keeping import NotStored, Place, keep, open_store
from steplab.lab.machine import doctor
from steplab.lab.measuring import measure
from steplab.lab.memory import memory
from steplab.lab.profiling import profile
from steplab.measurement.processes.launch import numerics_in_child
from steplab.measurement.progress import OnProgress
from steplab.records.codec import new_head
from steplab.records.failure import Failure
from steplab.records.numerics import Numerics
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.specs import attention as attention_fields
from steplab.specs import comm as comm_fields
from steplab.specs.ddp import CHOSEN_BY_THE_STUDY
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.study import Part, StudySpec, as_grid, labels
from steplab.store.cells import cell_key, part_key

Measure = Callable[..., Record]
"""Measures and stores one record; takes name, store, place, timeout_s and on_progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyJob:
    """One measurement of a study."""

    key: str
    """Its key in the store."""
    what: str
    """What tells it from the other measurements of the study, in words."""
    measure: Measure
    """Measures it and stores the record. Raises SteplabError where that cannot be done at all."""
    num_steps: int = 0
    """Warm-up and measured steps; 0: not known."""


def jobs_of(study: StudySpec) -> list[StudyJob]:
    """The measurements of a study in the order they are made. Raises UserError for invalid options of a benchmark."""
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
        else StudyJob(key=part_key(part), what=_BENCHMARKS[part.kind].what, measure=_benchmark(part))
        for part in study.parts
    ]
    first = [job for job, part in zip(parts, study.parts, strict=True) if part.kind == "doctor"]
    return [*first, *timed, *(job for job in parts if job not in first)]


# --- steps ------------------------------------------------------------------------------------------------


def _measured(
    kind: Callable[..., Any],
    work: Callable[..., Record],
    spec: StepSpec,
    *,
    store: Path | str | None,
    place: Place,
    **options: Any,
) -> Record:
    """Measure one step; one that is refused becomes a record of that kind as well, so that it is a row among the
    others."""
    try:
        return work(spec, store=store, place=place, **options)
    except NotStored:
        raise
    except SteplabError as error:
        with open_store(store, write=True) as opened:
            if place.cell in opened.finished_cells(place.study_id):  # measured, and only what was watched is missing
                raise
            failure = Failure(kind="error", message=str(error))
            return keep(opened, kind(**new_head(), name=options["name"], spec=spec, failure=failure), place)


def _audit(
    spec: StepSpec, *, name: str, store: Path | str | None, place: Place, timeout_s: float, on_progress: OnProgress
) -> Numerics:
    """Audit one step in its precision."""
    with open_store(store, write=True) as opened:
        record = numerics_in_child(spec, timeout_s=timeout_s, on_progress=on_progress)
        return keep(opened, dataclasses.replace(record, name=name), place)


_time = partial(_measured, Run, measure)
_STEPS: dict[str, tuple[str, Measure]] = {
    "profile": ("profile", partial(_measured, Run, profile)),
    "memory": ("memory", partial(_measured, Run, memory)),
    "precision": ("audit", partial(_measured, Numerics, _audit)),
}
"""What each part of steps is called, and what measures it."""


# --- benchmarks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Benchmark:
    """A part of a study with the options of the command of its name."""

    what: str
    """What it is called."""
    fields: Collection[str] = ()
    """The declared fields of what it measures, by the names of their options."""
    use_case: Callable[..., Any]
    """The function that the command calls with its other options; its parameters are the options."""
    make: Callable[..., Measure]
    """Function that makes its measurement: takes the fields that are given, and the other options as keywords."""

    def keywords(self) -> dict[str, Any]:
        """The options that are no fields, each with its type."""
        parameters = [*signature(self.use_case).parameters.values(), *signature(self.make).parameters.values()]
        return {
            parameter.name.strip("_"): parameter.annotation
            for parameter in parameters
            if parameter.name not in _NO_OPTIONS and parameter.kind is not Parameter.VAR_KEYWORD
        }


_NO_OPTIONS = frozenset({"fields", "lists", "name", "store", "place", "timeout_s", "on_progress"})
"""Parameters of a benchmark that are its fields, or that the whole study decides."""
_EARLIER_NAMES = {"contenders": "variants"}
"""Options that had another name, which stored studies are known by."""


def options_of(kind: str) -> frozenset[str]:
    """The names of the options that a benchmark takes, without earlier names."""
    return frozenset({*_BENCHMARKS[kind].fields, *_BENCHMARKS[kind].keywords()})


def _benchmark(part: Part) -> Measure:
    """What measures a benchmark with its options. Raises UserError for options that are not valid."""
    benchmark, known = _BENCHMARKS[part.kind], options_of(part.kind)
    fields, own, types = dict[str, Any](), dict[str, Any](), benchmark.keywords()
    for given, value in part.options.items():
        option = _EARLIER_NAMES.get(given, given)
        if option not in known:
            raise UserError(f"[[{part.kind}]] has no option '{given}'; choose one of {', '.join(sorted(known))}")
        if option != given and option in part.options:
            raise UserError(f"[[{part.kind}]] has {option} and, by its earlier name, {given}; leave {given} out")
        if option in benchmark.fields:
            fields[option] = value
        else:  # a name that Python does not allow for a parameter has an underscore behind it
            own[f"{option}_" if iskeyword(option) else option] = _read(f"[[{part.kind}]] {given}", value, types[option])
    return benchmark.make(fields, **own)


def _read(what: str, value: object, wanted: Any) -> Any:
    """The value of an option, in a list if one is wanted. Raises UserError for another type."""
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        try:
            return msgspec.convert([value], wanted)
        except msgspec.ValidationError:
            raise UserError(f"{what} is of another type than it should be: {error}") from error


def _doctor(fields: Mapping[str, Any], **own: Any) -> Measure:
    def measure(*, name: str, **how: Any) -> Record:
        return doctor(**own, **how)

    return measure


def _attention(fields: Mapping[str, Any], *, grid: str | None = None, **own: Any) -> Measure:
    return partial(measure_attention, attention_study(grid, as_grid(fields), **own))


def _comm(fields: Mapping[str, Any], **own: Any) -> Measure:
    study, device = comm_study(as_grid(fields), **own)
    return partial(measure_comm, study, device=device)


def _ddp(fields: Mapping[str, Any], *, traces: str | None = None, **own: Any) -> Measure:
    return partial(measure_ddp, ddp_study(fields, **own), traces=traces)


_BENCHMARKS = {
    "doctor": _Benchmark(what="the machine's ceilings", use_case=doctor, make=_doctor),
    "attention": _Benchmark(
        what="attention by itself", fields=attention_fields.FIELDS, use_case=attention_study, make=_attention
    ),
    "comm": _Benchmark(what="collectives", fields=comm_fields.FIELDS, use_case=comm_study, make=_comm),
    "ddp": _Benchmark(
        what="data parallelism", fields=FIELDS.keys() - CHOSEN_BY_THE_STUDY, use_case=ddp_study, make=_ddp
    ),
}
