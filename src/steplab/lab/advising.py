"""Search for a faster step, change by change."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from steplab.comparison.turns import chained
from steplab.errors import Remark, UserError, warn_caller
from steplab.lab.checkpointing import choose_checkpointing
from steplab.lab.keeping import checked_name, keep, open_store
from steplab.lab.measuring import asked_step
from steplab.lab.outlook import Attempt, Candidate, Outlook, now, step_s, waited
from steplab.lab.profiling import profile
from steplab.lab.turns import LEAST_GAIN, STEPS, StoredSession, failure_words
from steplab.measurement.processes.turns import Session, Side
from steplab.measurement.progress import OnProgress
from steplab.records.advice import Advice, Tried
from steplab.records.codec import new_head
from steplab.records.comparison import Ratio
from steplab.records.disturbances import disturbances
from steplab.records.failure import Failure
from steplab.records.run import Run
from steplab.specs.changes import FREEING, OPT_IN, Change
from steplab.specs.checkpointing import AUTO
from steplab.specs.own_loop import own_loop, own_model
from steplab.specs.step import StepSpec
from steplab.units import format_time

_MOST_PROCESSES = 3
"""Process starts of one comparison if each turn needs a new process: fastest step, changed step, fastest step."""


@dataclass(eq=False, kw_only=True)
class Walk:
    taking: StoredSession
    outlook: Outlook
    steps: int
    budget_s: float | None
    """Seconds after which no further change is tried; None: no limit."""
    clock: Callable[[], float]
    on_change: Callable[[str], None]
    on_attempt: Callable[[Attempt], None]
    start: Any = None
    met: Ratio | None = None
    again: Any = None
    interrupted: KeyboardInterrupt | None = None
    _built_s: list[float] = field(default_factory=list)
    _turns: list[float] = field(default_factory=list)

    def go(self, spec: StepSpec) -> None:
        self._began_s = self.clock()
        start = self._built("start", spec, "the step as given", by_itself=True)
        took_s, measured_s = self.clock() - self._began_s, step_s(start.run)
        self._built_s.append(max(took_s - self.outlook.compile_s(spec) - self.steps * (measured_s or 0.0), 0.0))
        self.start = start
        trial_s, left_s = self._trial_s(measured_s), self.left_s
        # A profile builds the step again, as each change does; without time for a change it would be useless.
        self.outlook.look(start.environment, may_profile=left_s >= 2 * trial_s and not start.failure)
        if start.failure:
            self._make_room()
        elif left_s < trial_s:
            anew = self.taking.session.alternating
            doing, as_long = ("measuring", "at least twice as long") if anew else ("building", "as long")
            took = f"took {format_time(took_s)} of the budget of {format_time(self.budget_s or 0.0)}"
            why = f"{doing} the step as given {took}, and each change takes {as_long}"
            warn_caller(Remark(f"{why}: only the step as given is measured"))
        if self._goes_on and not self.taking.session.alternating:
            self.taking.session.measure([self.best], 1)  # which shows whether the device waits for the host
        self._look_at_best()
        while candidate := next((each for each in self.untried if self._has_time(each.takes_s)), None):
            self._try(candidate)
        if len(self.kept) < 2 or start.failure or not self._goes_on:
            return
        if self._has_time(self._trial_s(step_s(self.leave(start))) + self.outlook.compile_s(spec)):
            self.again = self._built("start again", spec, "the first step next to the fastest")
            self._seek_gain(self.best, self.again)
            self.met = None if self._is_cut_off(self.best, self.again) else self.taking.gain(self.again, self.best)
            self.leave(self.again)

    @property
    def kept(self) -> list[Attempt]:
        return [attempt for attempt in self.outlook.attempts if attempt.kept]

    @property
    def best(self) -> Any:
        return self.kept[-1].side if self.kept else self.start

    @property
    def overall(self) -> Ratio | None:
        """Time ratio of the fastest step to the first: measured, else the product of the kept changes' ratios."""
        ratios = [attempt.ratio for attempt in self.kept if attempt.ratio]
        return self.met or (chained(ratios) if ratios and len(ratios) == len(self.kept) else None)

    @property
    def untried(self) -> Iterable[Candidate]:
        if not self._goes_on:
            return ()
        trial_s = self._trial_s(step_s(self.best.run))
        return self.outlook.candidates(self.best, trial_s, alternating=bool(self.taking.session.alternating))

    def leave(self, side: Side) -> Run | None:
        """Store a step's record; None if the search was interrupted before the step ran."""
        if self.interrupted and side.run is None and not side.failure:
            return None
        return self.taking.leave(side)

    def _trial_s(self, other_s: float | None) -> float:
        known_s = sum(each for each in (step_s(self.best.run), other_s) if each)
        if self.taking.session.alternating:
            return _MOST_PROCESSES * median(self._built_s) + self.steps * known_s
        return median(self._built_s) + (median(self._turns) * known_s if self._turns else 0.0)

    def _has_time(self, takes_s: float) -> bool:
        left_s = self.left_s
        if self.budget_s is not None:
            self.taking.session.timeout_s = max(left_s, 1.0)
        return left_s > 0 and left_s >= takes_s

    @property
    def left_s(self) -> float:
        """Seconds left of the budget: negative once exceeded, infinite without a budget."""
        return math.inf if self.budget_s is None else self.budget_s - (self.clock() - self._began_s)

    @property
    def _goes_on(self) -> bool:
        return self.best is not None and not self.best.failure

    def _look_at_best(self) -> None:
        if self._goes_on and self.best.run:
            self.outlook.see(self.best.run)

    # --- trying -------------------------------------------------------------------------------------------

    def _try(self, candidate: Candidate) -> None:
        began_s = self.clock()
        attempt = self._attempt(candidate.change, candidate.promise)
        built_s, base, side = self.clock(), attempt.base, attempt.side
        try:
            if side is not None:
                self._seek_gain(base, side, most_s=built_s - began_s)
        except UserError as error:  # with a process per turn, it is known only now
            attempt.side, attempt.failure = None, str(error)
        if attempt.side is not None:
            if self._is_cut_off(base, side, of=attempt):
                return
            decided_s, ratio = self.clock(), self.taking.gain(base, side)
            attempt.ratio, attempt.took_s = ratio, decided_s - began_s
            attempt.kept = ratio is not None and ratio.decision == "lower"
            left = None if attempt.kept else self.leave(side)
            if ratio is None:
                attempt.failure = failure_words(left.failure) if left and left.failure else "the step without it failed"
            elif not self.taking.session.alternating:
                self._built_s.append(built_s - began_s - (side.run.timing.first_step_s or 0.0))
                self._turns.append((decided_s - built_s) / (ratio.a + ratio.b))
        self._settle(attempt)

    def _is_cut_off(self, *sides: Any, of: Attempt | None = None) -> bool:
        """True if the budget ran out during this measurement. The change then counts as not tried; its record stays."""
        late = [side for side in sides if side.failure and side.failure.kind == "timeout"]
        if not late or self.left_s > 0:
            return False
        for side in late:
            side.failure = side.failure if side.run is None else None
        if of is not None:
            why = f"the budget was over before {of.change.words_along(of.base.spec)} was decided"
            left = self.leave(of.side) if of.side.run is not None else None
            has = f", and record {left.id} has the turns until then" if left else ""
            warn_caller(Remark(f"{why}; it counts as not tried{has}"))
        return True

    def _settle(self, attempt: Attempt) -> None:
        self.outlook.settle(attempt)
        self.on_attempt(attempt)
        if attempt.kept:
            self.leave(attempt.base)
        self._look_at_best()

    def _built(self, label: str, spec: StepSpec, words: str, *, by_itself: bool = False) -> Any:
        """Start a step's process. Where each turn has a process of its own, none starts yet; `by_itself` then measures
        the step now, alone. Raises UserError if the device refuses the step.
        """
        self.on_change(words)
        side = self.taking.enter(label, spec)
        if by_itself and self.taking.session.alternating:
            self.taking.session.measure([side], self.steps)
        return side

    def _attempt(self, change: Change, promise: Any, *, by_itself: bool = False) -> Attempt:
        spec = self.best.spec
        attempt = Attempt(change=change, base=self.best, promise=promise)
        try:
            attempt.side = self._built(change.words, change.made(spec), change.words_along(spec), by_itself=by_itself)
        except UserError as error:
            attempt.failure = str(error)
        return attempt

    def _seek_gain(self, before: Any, after: Any, most_s: float = 0.0) -> None:
        """Alternate two steps to measure the gain, in further turns for at most `most_s` seconds. If earlier pairs
        fitted in memory together, one that does not fails: with a process per turn, noise would hide small gains.
        """
        ratios = [attempt.ratio for attempt in self.outlook.attempts if attempt.ratio]
        apart = not ratios or any(ratio.threshold > LEAST_GAIN for ratio in ratios)
        self.taking.seek_gain(before, after, self.steps, most_s=most_s, clock=self.clock, apart=apart)

    def _make_room(self) -> None:
        for change in self.outlook.changes(self.start.spec) if _lacks_memory(self.start) else ():
            spec = self.best.spec
            if not (change.field in FREEING or change.makes_room) or change not in self.outlook.untried(spec):
                continue
            if not self._has_time(self._trial_s(None)):
                warn_caller(Remark(f"the budget was over before {change.words} was tried, which needs less memory"))
                return
            self.outlook.gone.add(now(spec, change))  # what does not fit is not gone back to
            attempt = self._attempt(change, self.outlook.promise(spec, change), by_itself=True)
            if attempt.side is not None:
                if self._is_cut_off(attempt.side, of=attempt):
                    return
                attempt.kept = attempt.side.failure is None or _lacks_memory(attempt.side)
                attempt.failure = failure_words(attempt.side.failure) if attempt.side.failure else None
                if not attempt.kept:
                    self.leave(attempt.side)
            self._settle(attempt)
            if self._goes_on:
                return


def _lacks_memory(side: Any) -> bool:
    """True if a step ran out of memory; on a CPU, Linux kills the process with SIGKILL."""
    failure = side.failure
    return failure is not None and (failure.kind == "out_of_memory" or failure.signal == "SIGKILL")


_PROFILED_STEPS = 5
_NOTICEABLY_OVER = 0.1


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
    """Search for the fastest step, one change at a time, and store the search and all its runs.

    `spec` and `fields` are as in `measure`; `steps` defaults to 30 in each comparison:

        advice = advise("small", context=512)
        advice.best, advice.overall.ratio

    `keep_precision` keeps number formats; `opt_in` names further changes: fp8. The search ends after `budget_s`
    seconds; the given step is always measured, with a Remark if that leaves no time. `on_change` gets a description of
    the next measurement, `on_tried` each tried change. An interrupted search is stored too. Raises UserError for an
    unmeasurable step.
    """
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
                walk.interrupted = error
                advice = keep(opened, _recorded(walk, name, chosen.notes))
        if walk.interrupted:
            raise KeyboardInterrupt(f"record {advice.id} has the search until then") from walk.interrupted
        return advice


def _recorded(walk: Walk, name: str, notes: tuple[str, ...]) -> Advice:
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
    sides = {walk.best: "the fastest step", walk.again if walk.met else walk.start: "the step as given"}
    for side, words in sides.items():
        if run := walk.leave(side):
            yield from (f"{words} ({run.id}): {disturbance.text}" for disturbance in disturbances(run))


def _notes(walk: Walk) -> Iterator[str]:
    if walk.interrupted:
        yield "interrupted; remaining changes are listed as not tried"
    if walk.budget_s and -walk.left_s > _NOTICEABLY_OVER * walk.budget_s:
        yield (
            f"the search took {format_time(-walk.left_s)} longer than its budget of {format_time(walk.budget_s)}: what "
            "had begun took longer than foreseen"
        )
    if walk.overall and not walk.met and len(walk.kept) > 1:
        yield (
            "the step as given and the fastest did not alternate: their ratio is the product of the kept changes' "
            "ratios, each from alternating turns"
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
    after = attempt.side.spec if attempt.side else attempt.change.made(attempt.base.spec)
    before = {*own_model(attempt.base.spec), *own_loop(attempt.base.spec)}
    return tuple(line for line in (*own_model(after), *own_loop(after)) if line not in before)


def _value(attempt: Attempt) -> str:
    if attempt.change.value != AUTO or attempt.change.field != "checkpointing" or attempt.side is None:
        return attempt.change.value
    chosen: str = attempt.side.spec.checkpointing
    return chosen


def _peak_bytes(run: Run | None) -> int | None:
    if run is None or run.memory is None:
        return None
    return run.peak.peak_allocated_bytes if run.peak else run.memory.host_peak_bytes
