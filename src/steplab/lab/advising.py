"""Walk from a step to the fastest that is found, and record the walk."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.machine import refuse_torchrun
from steplab.lab.measuring import asked_step
from steplab.lab.outlook import Attempt, Outlook, step_s, waited
from steplab.lab.profiling import profile
from steplab.lab.turns import STEPS, StoredSession
from steplab.lab.walking import Walk
from steplab.measurement.processes.turns import Session
from steplab.measurement.progress import OnProgress
from steplab.records.advice import Advice, Tried
from steplab.records.codec import new_head
from steplab.records.disturbances import disturbances
from steplab.records.failure import Failure
from steplab.records.run import Run
from steplab.specs.changes import OPT_IN
from steplab.specs.checkpointing import AUTO
from steplab.specs.own_loop import own_loop, own_model
from steplab.specs.step import StepSpec
from steplab.units import format_time

_PROFILED_STEPS = 5
"""Timed steps of the run whose profile is explained."""
_NOTICEABLY_OVER = 0.1
"""Share of the budget by which a walk may be longer without a note."""


def advise(
    spec: StepSpec | str | None = None,
    *,
    keep_precision: bool = False,
    opt_in: Sequence[str] = (),
    budget_s: float | None = None,
    name: str = "",
    store: Path | str | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_change: Callable[[str], None] = lambda what: None,
    on_tried: Callable[[Tried], None] = lambda tried: None,
    session: Callable[..., Session] = Session,
    profile: Callable[..., Run] = profile,
    clock: Callable[[], float] = time.monotonic,
    **fields: object,
) -> Advice:
    """Walk from a step to the fastest that is found, one change at a time, and store the walk and every run of it.

    `spec` and `fields` are as in `measure`; a step that says nothing of `steps` has 30 in each comparison:

        advice = advise("small", context=512)
        advice.best, advice.overall.ratio

    With `keep_precision`, number formats stay as they are; `opt_in` names changes that are tried only so: fp8. After
    `budget_s` seconds no further change is tried, and a change may take no longer than what is left; the step as given
    is measured in any case, and a Remark says at once if that leaves no time for a change. Of a step of several
    processes each turn starts them anew. `on_change` is called with what is measured next, and `on_tried` with what
    came of each change. An interrupted walk is stored as far as it got. Raises UserError for a step that cannot be
    measured.
    """
    refuse_torchrun("walk")
    if unknown := set(opt_in).difference(OPT_IN):
        raise UserError(f"opt_in '{min(unknown)}' is not known; choose one of {', '.join(OPT_IN)}")
    given = {"steps": STEPS, **fields} if not isinstance(spec, StepSpec) else fields
    chosen, name = choose_checkpointing(asked_step("advise", spec, given)), checked_name(name)
    asked = chosen.spec

    def profiled(step: StepSpec) -> Run:
        on_change("a profile of it, to explain")
        few = replace(step, steps=min(step.steps, _PROFILED_STEPS))
        return profile(few, name=name, store=store, on_progress=on_progress)

    with open_store(store, write=True) as opened:
        outlook = Outlook(spec=asked, profile=profiled, store=store, keep_precision=keep_precision, opt_in=opt_in)
        taking = StoredSession(session(timeout_s=None, on_progress=on_progress, loads_ahead=True), opened, name)
        interrupted: KeyboardInterrupt | None = None
        with taking:
            walk = Walk(
                taking=taking,
                outlook=outlook,
                steps=asked.steps,
                budget_s=budget_s,
                clock=clock,
                on_change=on_change,
                on_attempt=lambda attempt: on_tried(_tried(walk, attempt)),
            )
            try:
                walk.go(asked)
                advice = keep(opened, _recorded(walk, name, chosen.notes))
            except KeyboardInterrupt as error:
                if walk.start is None:
                    raise
                interrupted = walk.interrupted = error
                advice = keep(opened, _recorded(walk, name, chosen.notes))
        if interrupted:
            raise KeyboardInterrupt(f"record {advice.id} has the walk until then") from interrupted
        return advice


def _recorded(walk: Walk, name: str, notes: tuple[str, ...]) -> Advice:
    """The record of a walk that is over; its sides leave."""
    untried, overall = list(walk.untried), walk.overall
    start, best = walk.leave(walk.start), walk.leave(walk.best)
    failure = best.failure if best else Failure(kind="error", message="interrupted before the first turn")
    return Advice(
        **new_head(),
        name=name,
        environment=walk.best.environment,
        spec=walk.start.spec,
        failure=failure,
        notes=(*notes, *_notes(walk)),
        best=None if failure else walk.best.spec,
        start_id=start.id if start else None,
        best_id=best.id if best and not failure else None,
        start_s=overall.a if overall else step_s(start),  # of other turns it may be minutes away
        best_s=overall.b if overall else step_s(best),
        overall=overall,
        tried=tuple(_tried(walk, attempt) for attempt in walk.outlook.attempts),
        untried=tuple(candidate.change.words_along(walk.best.spec) for candidate in untried),
        untried_shares=tuple(candidate.promise.share if candidate.promise else None for candidate in untried),
        untried_fits=tuple(walk.outlook.fits(walk.best.spec, candidate.change) for candidate in untried),
        untried_s=sum(candidate.takes_s for candidate in untried) if untried else None,
        interrupted=walk.interrupted is not None,
        by_hand=walk.outlook.by_hand(best),
        doubts=tuple(_doubts(walk)),
        alternating=walk.taking.session.alternating,
    )


def _doubts(walk: Walk) -> Iterator[str]:
    """What disturbed the measurements of the first step and the fastest, whose times the answer states."""
    sides = {walk.best: "the fastest step", walk.again if walk.met else walk.start: "the step as given"}
    for side, words in sides.items():
        if run := walk.leave(side):
            yield from (f"{words} ({run.id}): {disturbance.text}" for disturbance in disturbances(run))


def _notes(walk: Walk) -> Iterator[str]:
    if walk.interrupted:
        yield "interrupted: what was not reached is listed as not tried"
    if walk.budget_s and -walk.left_s > _NOTICEABLY_OVER * walk.budget_s:
        yield (
            f"the walk took {format_time(-walk.left_s)} longer than its budget of {format_time(walk.budget_s)}: what "
            "had begun took longer than foreseen"
        )
    if walk.overall and not walk.met and len(walk.kept) > 1:
        yield (
            "the first step and the fastest did not take turns with each other: their ratio is the product of those of "
            "the changes that were kept, each measured in turns"
        )


def _tried(walk: Walk, attempt: Attempt) -> Tried:
    base, run = (side and (walk.taking.left.get(side) or side.run) for side in (attempt.base, attempt.side))
    change, promise = attempt.change, attempt.promise
    made = (*attempt.along, change)
    return Tried(
        field=change.field,
        value=_value(attempt),
        along=tuple(each.words for each in attempt.along),
        code=_added_lines(attempt),
        numerics="; ".join(each.numerics for each in made if each.numerics),
        predicted_share=promise.share if promise else None,
        predicted_by=promise.source if promise else "",
        ratio=attempt.ratio,
        waits_for_host=waited(attempt.side),
        kept=attempt.kept,
        failure=attempt.failure,
        peak_bytes=_peak_bytes(run),
        before_bytes=_peak_bytes(base),
        run_id=run.id if run else None,
        base_id=base.id if base else None,
        step_s=None if attempt.ratio else step_s(run),
        took_s=attempt.took_s,
    )


def _added_lines(attempt: Attempt) -> tuple[str, ...]:
    """The lines that are in the loop of the step with the change alone."""
    after = attempt.side.spec if attempt.side else attempt.change.made(attempt.base.spec)
    before = {*own_model(attempt.base.spec), *own_loop(attempt.base.spec)}
    return tuple(line for line in (*own_model(after), *own_loop(after)) if line not in before)


def _value(attempt: Attempt) -> str:
    """The value of the change; where that leaves a choice, what was chosen."""
    if attempt.change.value != AUTO or attempt.change.field != "checkpointing" or attempt.side is None:
        return attempt.change.value
    chosen: str = attempt.side.spec.checkpointing
    return chosen


def _peak_bytes(run: Run | None) -> int | None:
    """Peak memory of the device, or where that is not counted of the process."""
    if run is None or run.memory is None:
        return None
    peak = run.memory.peak("step")
    return peak.peak_allocated_bytes if peak else run.memory.host_peak_bytes
