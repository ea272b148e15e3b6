"""Compare precisions on one step: data types, lost values, inexact sums, and time saved.

Audits and timings have separate processes; one call's records share a study.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import get_args

from steplab.errors import SteplabError, Unsupported, UserError
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.measuring import named_fields
from steplab.lab.sweeping import DEFAULT_TIMEOUT_S, SweepProgress, sweep
from steplab.measurement.processes.launch import numerics_in_child
from steplab.measurement.progress import OnProgress
from steplab.records.codec import new_head
from steplab.records.failure import Failure
from steplab.records.numerics import Numerics
from steplab.records.run import Run
from steplab.specs.resolve import resolve_step
from steplab.specs.step import FIELDS, StepSpec
from steplab.specs.step_choices import Precision
from steplab.specs.study import StudySpec

AUDITED = ("fp16", "bf16")
"""Precisions audited by default: those of autocast."""
TIMED: tuple[str, ...] = get_args(Precision)
"""Precisions timed by default, if the step's other fields allow them."""
PARTS = ("audit", "accumulation", "timings")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionResult:
    numerics: tuple[Numerics, ...] = ()
    """One audit per precision; the accumulation study alone gives one record without a step."""
    runs: tuple[Run, ...] = ()
    study_id: str | None = None
    """Study of the timings; None without timings."""


def precision(
    model: str | None = None,
    *,
    precisions: Sequence[str] = (),
    parts: Sequence[str] = PARTS,
    name: str = "",
    store: Path | str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: OnProgress = lambda progress: None,
    on_sweep: Callable[[SweepProgress], None] = lambda progress: None,
    **fields: object,
) -> PrecisionResult:
    """Audit and time one step in several precisions, as `steplab precision` does, and store the records.

    `fields` are the step's, as in `measure`, without the precision; `parts` are some of audit, accumulation and
    timings:

        found = steplab.precision("toy", precisions=["bf16"], parts=["audit"])
        steplab.show(found.numerics[0])

    `precisions` are audited and timed; by default fp16 and bf16 are audited, and all possible ones timed. A failing or
    unsupported precision gives a record with a failure. Raises Unsupported for a precision that the fields exclude,
    UserError if none is supported, SteplabError if the store cannot be written.
    """
    given = named_fields(model, fields)
    if unknown := [part for part in parts if part not in PARTS]:
        raise UserError(f"part '{unknown[0]}' is not known; choose some of {', '.join(PARTS)}")
    checked_name(name)
    precisions = tuple(dict.fromkeys(precisions))
    audited = [_step(given, each) for each in precisions or AUDITED] if "audit" in parts else []
    timed = _timed(given, precisions) if "timings" in parts else []
    study = StudySpec(name=name or "precision", description="one step in several precisions", cells=tuple(timed))
    device = resolve_step(given).device
    found: list[Numerics] = []
    waiting: list[Numerics] = []  # refused before any was served: unless one is, nothing is stored
    first: SteplabError | None = None
    served = False
    asked: Sequence[StepSpec | None] = audited or ([None] if "accumulation" in parts else [])
    with open_store(store, write=True) as opened:
        begin = cache(partial(opened.begin_study, study))
        for spec in asked:
            try:
                waiting.append(numerics_in_child(spec, device=device, timeout_s=timeout_s, on_progress=on_progress))
                served = True
            except SteplabError as error:  # of this precision, perhaps, and not of the others
                first = first or error
                failure = Failure(kind="error", message=str(error))
                waiting.append(Numerics(**new_head(), spec=spec, failure=failure))
            while served and waiting:
                record = dataclasses.replace(waiting.pop(0), name=name, study=begin() if timed else None)
                found.append(keep(opened, record))
        if first and not served:
            raise first
        study_id = begin() if timed else None
    if not timed:
        return PrecisionResult(numerics=tuple(found))
    # The sweep continues the newest study over these cells, which has just begun.
    result = sweep(study, store=store, resume=True, timeout_s=timeout_s, on_progress=on_sweep)
    return PrecisionResult(numerics=tuple(found), runs=result.runs, study_id=study_id)


def _timed(fields: Mapping[str, object], precisions: Sequence[str]) -> list[StepSpec]:
    """The step in each of `precisions`, by default in all that its fields allow: bf16_master needs masters."""
    if precisions:
        return [_step(fields, precision) for precision in precisions]
    steps: list[StepSpec] = []
    refusals: list[Unsupported] = []
    for precision in TIMED:
        try:
            steps.append(_step({"optimizer": FIELDS["optimizer"].default, **fields}, precision))
        except Unsupported as error:
            refusals.append(error)
    if not steps:
        raise refusals[0]
    return steps


def _step(fields: Mapping[str, object], precision: str) -> StepSpec:
    return resolve_step({**fields, "precision": precision})
