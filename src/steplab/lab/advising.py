"""Walk from a step to the fastest that is found, and record the walk."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from steplab.errors import SteplabError
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.explaining import explain
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.measuring import asked_step
from steplab.lab.processes import refuse_torchrun
from steplab.lab.profiling import profile
from steplab.lab.turns import STEPS, StoredSession
from steplab.lab.walking import Attempt, Outlook, Promise, Walk, step_s
from steplab.measurement.processes.turns import Session
from steplab.measurement.progress import OnProgress
from steplab.plan.host import compile_s, on_the_host_of
from steplab.plan.layout.time import layout_step_s
from steplab.plan.rates import Gpu, gpu_named
from steplab.plan.time import predict_step_time
from steplab.records.advice import Advice, Tried
from steplab.records.codec import new_head
from steplab.records.environment import Environment
from steplab.records.failure import Failure
from steplab.records.finding import Finding
from steplab.records.run import Run
from steplab.specs.attention_kernels import chosen_by_auto
from steplab.specs.changes import Change, changes_for
from steplab.specs.checkpointing import AUTO
from steplab.specs.hardware import find_hardware
from steplab.specs.layout import SINGLE
from steplab.specs.step import StepSpec
from steplab.units import format_time

_NOTICEABLY_OVER = 0.1
"""Share of the budget by which a walk may be longer without a note."""
_PROFILED_STEPS = 5
"""Timed steps of the run whose profile is explained."""


def advise(
    spec: StepSpec | str | None = None,
    *,
    keep_precision: bool = False,
    budget_s: float | None = None,
    name: str = "",
    store: Path | str | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_change: Callable[[str], None] = lambda what: None,
    session: Callable[..., Session] = Session,
    profile: Callable[..., Run] = profile,
    clock: Callable[[], float] = time.monotonic,
    **fields: object,
) -> Advice:
    """Walk from a step to the fastest that is found, one change at a time, and store the walk and every run of it.

    `spec` and `fields` are as in `measure`; a step that says nothing of `steps` has 30 in each comparison:

        advice = advise("small", context=512)
        advice.best, advice.overall.ratio

    With `keep_precision`, number formats stay as they are. After `budget_s` seconds no further change is tried, and a
    change may take no longer than what is left; the step as given is measured in any case, and a Remark says at once if
    that leaves no time for a change. Of a step of several processes each turn starts them anew. `on_change` is called
    with what is measured next. An interrupted walk is stored as far as it got. Raises UserError for a step that cannot
    be measured.
    """
    refuse_torchrun("walk")
    given = {"steps": STEPS, **fields} if not isinstance(spec, StepSpec) else fields
    chosen, name = choose_checkpointing(asked_step("advise", spec, given)), checked_name(name)
    asked = chosen.spec
    with open_store(store, write=True) as opened:
        found = _Findings(asked, store, name, on_progress, on_change, profile)
        taking = StoredSession(session(timeout_s=None, on_progress=on_progress, loads_ahead=True), opened, name)
        interrupted: KeyboardInterrupt | None = None

        def changes(spec: StepSpec) -> list[Change]:
            return changes_for(spec, found.device_kind, keep_precision=keep_precision)

        with taking:
            walk = Walk(
                taking=taking,
                outlook=Outlook(
                    changes=changes,
                    recipe=lambda spec: [each for each in changes(spec) if each.is_fast(spec, found.device_kind)],
                    forecast=found.promise,
                    meant=found.meant,
                    compile_s=found.compile_s,
                ),
                steps=asked.steps,
                budget_s=budget_s,
                clock=clock,
                on_change=on_change,
                on_start=found.look,
                on_best=found.see,
            )
            try:
                walk.go(asked)
            except KeyboardInterrupt as error:
                if walk.start is None:
                    raise
                interrupted = walk.interrupted = error
            advice = keep(opened, _recorded(walk, found, name, chosen.notes))
        if interrupted:
            raise KeyboardInterrupt(f"record {advice.id} has the walk until then") from interrupted
        return advice


class _Findings:
    """What is predicted: by `plan time`, or of several processes `plan layout`, where it knows the step and the GPU,
    otherwise by the findings on a profile."""

    def __init__(
        self,
        spec: StepSpec,
        store: Path | str | None,
        name: str,
        on_progress: OnProgress,
        on_change: Callable[[str], None],
        profile: Callable[..., Run],
    ) -> None:
        self._spec, self._store, self._name = spec, store, name
        self._on_progress, self._on_change, self._profile = on_progress, on_change, profile
        self._gpu: Gpu | None = None
        self._planned: dict[StepSpec, float | None] = {}
        self._findings: Sequence[Finding] = ()
        self._step_s: float | None = None
        self._device_name = ""
        self.device_kind = "cpu"

    def look(self, environment: Environment | None, may_profile: bool) -> None:
        """Find out what there is to predict by, once the device is known."""
        if environment is None:
            return
        self.device_kind, self._device_name = environment.device.kind, environment.device.name
        known = find_hardware(self._device_name)
        self._gpu = gpu_named(known.name) if known else None
        if self._planned_s(self._spec) is None and may_profile:
            self._explain()

    def see(self, run: Run) -> None:
        """Predict from now on by the pace of the host that a measured step shows."""
        if self._gpu is None or run.spec is None or self._planned_s(run.spec) is None:
            return
        gpu = on_the_host_of(run, self._gpu)
        if gpu is not self._gpu:
            self._gpu, self._planned = gpu, {}

    def compile_s(self, spec: StepSpec) -> float:
        """Seconds that compiling a step takes; 0 where that is not known."""
        return compile_s(spec, self._gpu) if self._gpu else 0.0

    def meant(self, spec: StepSpec, field: str, value: str) -> str:
        """What a value of a field comes to on the device: what `auto` chooses."""
        if (field, value) == ("reshard_after_forward", "auto"):
            return "always" if replace(spec, reshard_after_forward="auto").reshards else "never"
        if (field, value) != ("attention", "auto") or spec.model.shape is None:
            return value
        return chosen_by_auto(spec, spec.model.shape, self._device_name).implementation

    def promise(self, spec: StepSpec, change: Change) -> Promise | None:
        """The predicted gain of a change of a step."""
        before_s = self._planned_s(spec)
        after_s = self._planned_s(change.made(spec)) if before_s else None
        if before_s and after_s:
            if spec.layout == SINGLE:
                return Promise(share=1 - after_s / before_s, source="plan time")
            # A plan of layouts does not know every choice; of one that it does not, both have the same time.
            return Promise(share=1 - after_s / before_s, source="plan layout") if after_s != before_s else None
        for finding in self._findings:
            if finding.fields == {change.field: change.value} and finding.saves_s is not None and self._step_s:
                return Promise(share=finding.saves_s / self._step_s, source=finding.kind)
        return None

    def by_hand(self, best: Run | None) -> tuple[Finding, ...]:
        """The findings that no field of a step answers."""
        found = self._findings or (explain(best, store=self._store).findings if best and not best.failure else ())
        return tuple(finding for finding in found if not finding.fields)

    def _planned_s(self, spec: StepSpec) -> float | None:
        if spec not in self._planned:
            try:
                self._planned[spec] = _predicted_s(spec, self._gpu) if self._gpu else None
            except SteplabError:
                self._planned[spec] = None
        return self._planned[spec]

    def _explain(self) -> None:
        self._on_change("a profile of it, to explain")
        spec = replace(self._spec, steps=min(self._spec.steps, _PROFILED_STEPS))
        run = self._profile(spec, name=self._name, store=self._store, on_progress=self._on_progress)
        if run.failure is None:
            found = explain(run, store=self._store)
            self._findings, self._step_s = found.findings, found.step_s


def _predicted_s(spec: StepSpec, gpu: Gpu) -> float | None:
    """The predicted time of a step in seconds. Raises Unsupported for one that cannot be predicted."""
    return predict_step_time(spec, gpu).central_s if spec.layout == SINGLE else layout_step_s(spec, gpu)


def _recorded(walk: Walk, found: _Findings, name: str, notes: tuple[str, ...]) -> Advice:
    """The record of a walk that is over; its sides leave."""
    untried = walk.untried
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
        start_s=step_s(start),
        best_s=step_s(best),
        overall=walk.overall,
        tried=tuple(_tried(walk, attempt) for attempt in walk.attempts),
        untried=tuple(candidate.change.words for candidate in untried),
        untried_shares=tuple(candidate.promise.share if candidate.promise else None for candidate in untried),
        untried_s=sum(candidate.takes_s for candidate in untried) if untried else None,
        by_hand=found.by_hand(best),
        alternating=walk.taking.session.alternating,
    )


def _notes(walk: Walk) -> Iterator[str]:
    if walk.interrupted:
        yield "interrupted: what was not reached is listed as not tried"
    if walk.budget_s and walk.over_s > _NOTICEABLY_OVER * walk.budget_s:
        yield (
            f"the walk took {format_time(walk.over_s)} longer than its budget of {format_time(walk.budget_s)}: what "
            "had begun took longer than foreseen"
        )
    if not walk.met:
        yield (
            "the first step and the fastest did not take turns with each other: their ratio is the product of those of "
            "the changes that were kept, each measured in turns"
        )


def _tried(walk: Walk, attempt: Attempt) -> Tried:
    base, run = walk.leave(attempt.base), walk.leave(attempt.side) if attempt.side else None
    change, promise = attempt.change, attempt.promise
    made = (*attempt.along, change)
    return Tried(
        field=change.field,
        value=_value(attempt),
        along=tuple(each.words for each in attempt.along),
        code=tuple(line for each in made for line in each.code.splitlines()),
        numerics="; ".join(each.numerics for each in made if each.numerics),
        predicted_share=promise.share if promise else None,
        predicted_by=promise.source if promise else "",
        ratio=attempt.ratio,
        waits_for_host=attempt.waits_for_host,
        kept=attempt.kept,
        failure=attempt.failure,
        peak_bytes=_peak_bytes(run),
        before_bytes=_peak_bytes(base),
        run_id=run.id if run else None,
        base_id=base.id if base else None,
        took_s=attempt.took_s,
    )


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
