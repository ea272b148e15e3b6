"""The walk from one step to a faster one: which change is tried next, and which is kept.

Each change is measured in turns with the fastest step until then, and kept only if the interval of the ratio says that
it pays; what the turns leave open gets more of them. Next is the change that is predicted to save most for the time
that trying it takes; then what else the recipe `fast` sets, which is known to pay on devices of this kind; then, the
shortest trials first, changes of which nothing is predicted; then those that are predicted to save less than what a
change is kept for; then those that should cost time. Of changes that save, those whose step fits the GPU's memory too
tightly to be promised come after the others, and last of all is what is predicted not to fit. One that would save, but
does not fit, is tried with a change that needs less memory, if it may fit with that.

Steps of several processes cannot wait for turns, so that each turn starts them anew, and whether a step runs is known
once it had one. What such processes differ by is then the least that a change is kept for.

While the device waits for the host, the ways to launch kernels come first: until that is settled, the noise of the host
is in every comparison, and what a change saves of the device's time is not seen. Once a change of the recipe `fast` did
not pay by itself, all that is left of the recipe is a change too, so that the walk ends no slower than the recipe.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from steplab.comparison.samples import FEWEST, SEPARATE
from steplab.comparison.turns import chained, step_ratio
from steplab.errors import Remark, UserError, warn_caller
from steplab.lab.attempts import Attempt, Candidate, step_s, waited
from steplab.lab.explaining import failure_words
from steplab.lab.outlook import Outlook, Promise
from steplab.lab.turns import StoredSession
from steplab.measurement.processes.turns import Side
from steplab.records.comparison import Ratio
from steplab.records.failure import Failure
from steplab.records.prediction import FitVerdict
from steplab.records.run import Run
from steplab.specs.changes import Change
from steplab.specs.step import FIELDS, StepSpec
from steplab.units import format_time

_MAKE_ROOM = ("attention", "loss", "precision")
"""Fields whose changes need less memory and no more time, where the first step does not fit."""
_IN_DOUBT = ("too tight to promise", "does not fit")
_LAUNCHING = ("compile", "cuda_graph")
"""Fields that change how many kernels are launched, and how."""
_FIRST_STEPS = 1
"""How often the first step is measured by itself, to see whether the device waits for the host."""
_PLAIN = 0.03
"""A difference that is larger than this share with the fewest turns that have an interval gets no more of them."""
_LEAST_GAIN = 0.003
"""The smallest gain that a change is kept for, as a share of the step; several such add up to what matters."""
_MOST_ROUNDS = 2.5
"""How many times the first turns what these leave open may take: three rounds in all, as the third ends after that."""
_MOST_PROCESSES = 3
"""Processes of a comparison, at most, where each turn is one: the fastest step, the other, the fastest again."""
_LEAST_TRIAL_S = 1.0
"""What a trial is taken to need at least."""


@dataclass(eq=False, kw_only=True)
class Walk:
    """A walk under way, and what it has found so far."""

    taking: StoredSession
    outlook: Outlook
    steps: int
    """Measured steps of each side in a comparison."""
    budget_s: float | None
    """Seconds after which no further change is tried; None: all are."""
    clock: Callable[[], float]
    on_change: Callable[[str], None] = lambda what: None
    """Called with what is measured next."""
    on_attempt: Callable[[Attempt], None] = lambda attempt: None
    """Called with each change that was tried."""
    attempts: list[Attempt] = field(default_factory=list)
    start: Any = None
    """The side of the first step; None before it was built."""
    met: Ratio | None = None
    """Time of the fastest step over that of the first, measured in turns of the two; None: they had none."""
    again: Any = None
    """The side of the first step in those turns."""
    interrupted: KeyboardInterrupt | None = None
    """What ended the walk before its end; None: nothing."""
    _tried: set[tuple[str, str]] = field(default_factory=set)
    """The field and the meaning of each change that was tried, and its own value."""
    _given_room: set[StepSpec] = field(default_factory=set)
    """Steps that did not pay with a change and what made room for it; without that, or with another, they may."""
    _built_s: list[float] = field(default_factory=list)
    """Seconds that building each step took, without compilation: in each process of it."""
    _turns: list[float] = field(default_factory=list)
    """Seconds that the turns of each comparison took, over the sum of both step times."""

    def go(self, spec: StepSpec) -> None:
        """Walk from a step until no change is left, or the time is over."""
        self._began_s = self.clock()
        self.on_change("the step as given")
        start = self.taking.enter("start", spec)
        self._take_first_turn(start)
        took_s, measured_s = self.clock() - self._began_s, step_s(start.run)
        self._built_s.append(max(took_s - self.outlook.compile_s(spec) - self.steps * (measured_s or 0.0), 0.0))
        self.start = start
        trial_s, left_s = self._trial_s(measured_s), self._left_s()
        # A profile builds the step again, as each change does; one after which no change is tried would be of no use.
        self.outlook.look(self.start.environment, may_profile=left_s >= 2 * trial_s and not start.failure)
        if self.best.failure:
            self._make_room()
        elif left_s < trial_s:
            self._say_that_time_is_over(took_s)
        if self._goes_on() and not self.taking.session.alternating:
            self.taking.session.measure([self.best], _FIRST_STEPS)
        self._look_at_best()
        while self._goes_on() and (candidate := self._next()):
            self._try(candidate)
        if self.kept and not self.start.failure:
            self._compare_ends(spec)

    @property
    def kept(self) -> list[Attempt]:
        """The changes that were kept, in their order."""
        return [attempt for attempt in self.attempts if attempt.kept]

    @property
    def best(self) -> Any:
        """The side of the fastest step until now, which may have failed; None before the first was built."""
        return self.kept[-1].side if self.kept else self.start

    @property
    def overall(self) -> Ratio | None:
        """Time of the fastest step over that of the first, if need be put together of the changes between; None if
        nothing was kept, or the first step did not run."""
        ratios = [attempt.ratio for attempt in self.kept if attempt.ratio]
        return self.met or (chained(ratios) if ratios and len(ratios) == len(self.kept) else None)

    @property
    def untried(self) -> list[Candidate]:
        """The changes of the fastest step that were not tried, the next one first."""
        return list(self._in_order(self._candidates())) if self._goes_on() else []

    def fits(self, change: Change) -> bool:
        """Whether the fastest step with a change may fit the GPU, as all do but those that are predicted not to."""
        return self._room(change) != "does not fit"

    def leave(self, side: Side) -> Run | None:
        """The record of a side, which is ended if it is still there; None if it had no turn before an interruption."""
        if self.interrupted and side.run is None and not side.failure:
            return None
        return self.taking.leave(side)

    def record_of(self, side: Side) -> Run | None:
        """The record of a side, of its steps until now if it is still there; None if it has had no turn."""
        return self.taking.left.get(side) or side.run

    # --- what is next -------------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        return self.best is not None and not self.best.failure

    def _next(self) -> Candidate | None:
        """The change to try, among those for which there is time."""
        return next(self._in_order(each for each in self._candidates() if self._has_time(each.takes_s)), None)

    def _in_order(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Candidates in the order that the module's first lines have. Memory is predicted of those that should save,
        and of others as they are asked for, because that takes up to a second each."""
        ranked = sorted(candidates, key=self._rank)
        saving = [each for each in ranked if self._saves(each.promise)]
        yield from (each for each in saving if self._room(each.change) not in _IN_DOUBT)
        yield from (each for each in saving if self._room(each.change) == "too tight to promise")
        yield from (each for each in ranked if not self._saves(each.promise) and self.fits(each.change))
        yield from (each for each in ranked if not self.fits(each.change))

    def _room(self, change: Change) -> FitVerdict | None:
        return self.outlook.room(change.made(self.best.spec))

    def _saves(self, promise: Promise | None) -> bool:
        """Whether a change is predicted to save what it would be kept for: of a step that starts anew for each turn, a
        smaller saving would not be."""
        return promise is not None and promise.share > (SEPARATE if self.taking.session.alternating else _LEAST_GAIN)

    def _rank(self, candidate: Candidate) -> tuple[int, float]:
        """The order of candidates that fit equally well; of equal ones the first in the table."""
        takes_s = max(candidate.takes_s, _LEAST_TRIAL_S)
        share = candidate.promise.share if candidate.promise else None
        if share is None or not self._saves(candidate.promise):
            is_promoted = candidate.is_fast and (share is None or not self.taking.session.alternating)
            return (2 if is_promoted else 3 if share is None else 4 if share > 0 else 5), takes_s
        return (0 if candidate.change.field in _LAUNCHING and waited(self.best) else 1), -share / takes_s

    def _candidates(self) -> list[Candidate]:
        spec, trial_s = self.best.spec, self._trial_s(step_s(self.best.run))
        fast, found = self.outlook.recipe(spec), []
        for change in (*self._untried_of(spec), *self._rest_of_recipe(spec)):
            if change.makes_room:
                continue
            promise, is_fast = self.outlook.promise(spec, change), change in fast
            if self._saves(promise) and not self.fits(change):
                change = self._with_room(change)
                promise = self.outlook.promise(spec, change)
            takes_s = trial_s + self.outlook.compile_s(change.made(spec))
            found.append(Candidate(change=change, promise=promise, is_fast=is_fast, takes_s=takes_s))
        return found

    def _with_room(self, change: Change) -> Change:
        """A change whose step does not fit, together with another that needs less memory and leaves the numbers alone,
        if it may fit with that. What saves time as well comes first, by itself."""
        spec = self.best.spec
        if self.outlook.room(spec) == "does not fit":
            return change  # the fastest step runs, so that the prediction is wrong
        for other in self.outlook.changes(spec):
            if other.field not in _MAKE_ROOM or other.field in change.fields or other.numerics:
                continue
            if (other.field, other.value) not in self._tried and self._saves(self.outlook.promise(spec, other)):
                return change
            both = change.joined([other])
            if both.is_supported(spec) and both.made(spec) not in self._given_room and self.fits(both):
                return both
        return change

    def _rest_of_recipe(self, spec: StepSpec) -> Iterator[Change]:
        """What the recipe sets and the fastest step lacks, as one, once a part of it did not pay by itself: what each
        saves may be lost in noise, and what the host cannot launch in time may pay in CUDA graphs."""
        settled = {name for attempt in self.attempts if attempt.is_settled for name in attempt.change.fields}
        lacking = [each for each in self.outlook.recipe(spec) if each.field not in settled and self._differs(each)]
        brought = {need for each in lacking for need in each.needs.items()}
        parts = [each for each in lacking if (each.field, each.value) not in brought]
        if len(parts) < 2 or all((part.field, part.value) not in self._tried for part in parts):
            return
        rest = parts[0].joined(parts[1:])
        if rest.is_supported(spec) and not any(rest.fields <= attempt.change.fields for attempt in self.attempts):
            yield rest

    def _trial_s(self, other_s: float | None) -> float:
        """Seconds of a comparison of the fastest step with another of that length, without compilation."""
        known_s = [each for each in (step_s(self.best.run), other_s) if each]
        if self.taking.session.alternating:
            return _MOST_PROCESSES * median(self._built_s) + self.steps * sum(known_s)
        return median(self._built_s) + (median(self._turns) * sum(known_s) if self._turns else 0.0)

    def _untried_of(self, spec: StepSpec) -> list[Change]:
        """The changes of a step that would make another step than those tried, and are worth trying after them."""
        timed = {(attempt.change.field, attempt.change.value) for attempt in self.attempts if attempt.ratio}
        return [
            change
            for change in self.outlook.changes(spec)
            if (change.field, change.value) not in self._tried
            and self._meaning(spec, change) not in self._tried
            and self._differs(change)
            and not any((change.field, value) in timed for value in change.pointless_after)
        ]

    def _differs(self, change: Change) -> bool:
        """Whether the fastest step with a change is another one."""
        spec = self.best.spec
        return self._meaning(spec, change)[1] != self.outlook.meant(spec, *_now(spec, change))

    def _meaning(self, spec: StepSpec, change: Change) -> tuple[str, str]:
        return change.field, self.outlook.meant(spec, change.field, change.value)

    def _has_time(self, takes_s: float) -> bool:
        """Whether there is time for something; it may then take no longer than what is left."""
        if self.budget_s is None:
            return True
        left_s = self._left_s()
        self.taking.session.timeout_s = max(left_s, 1.0)
        return left_s > 0 and left_s >= takes_s

    def _left_s(self) -> float:
        """Seconds that are left of the budget; infinite without one."""
        return math.inf if self.budget_s is None else self.budget_s - (self.clock() - self._began_s)

    @property
    def over_s(self) -> float:
        """Seconds by which the walk took longer than its budget; 0 if it did not, or has none."""
        return max(0.0, -self._left_s())

    def _say_that_time_is_over(self, took_s: float) -> None:
        took, budget = format_time(took_s), format_time(self.budget_s or 0.0)
        anew = self.taking.session.alternating
        doing, as_long = ("measuring", "at least twice as long") if anew else ("building", "as long")
        why = f"{doing} the step as given took {took} of the budget of {budget}, and each change takes {as_long}"
        warn_caller(Remark(f"{why}: only the step as given is measured"))

    # --- trying -------------------------------------------------------------------------------------------

    def _try(self, candidate: Candidate) -> None:
        """Try a change; one that the end of the budget or an interruption cuts off was not tried."""
        began_s = self.clock()
        attempt = self._attempt(candidate.change, candidate.promise)
        if attempt.side is None or self._decide(attempt, began_s):
            self._settle(attempt)
            self._look_at_best()
        else:
            self._say_that_it_was_cut_off(attempt)

    def _say_that_it_was_cut_off(self, attempt: Attempt) -> None:
        words = attempt.change.words_along(attempt.base.spec)
        why = f"the budget was over before {words} was decided; it counts as not tried"
        if attempt.side.run is not None and (left := self.leave(attempt.side)):
            why += f", and record {left.id} has the turns until then"
        warn_caller(Remark(why))

    def _decide(self, attempt: Attempt, began_s: float) -> bool:
        """Measure a change that was built, and keep or drop it; False: the budget was over before that."""
        built_s, sides = self.clock(), [self.best, attempt.side]
        try:
            self._measure(sides, most_s=built_s - began_s)
        except UserError as error:  # where each turn has a process of its own, it says so only now
            attempt.side, attempt.failure = None, str(error)
            return True
        if self._is_cut_off(sides):
            return False
        decided_s = self.clock()
        attempt.ratio = self._ratio(sides)
        attempt.kept = attempt.ratio is not None and attempt.ratio.decision == "lower"
        left = None if attempt.kept else self.leave(attempt.side)
        if attempt.ratio is None:
            attempt.failure = failure_words(left.failure) if left and left.failure else "the step without it failed"
        attempt.took_s = decided_s - began_s
        if attempt.ratio and not self.taking.session.alternating:
            self._built_s.append(built_s - began_s - (attempt.side.run.timing.first_step_s or 0.0))
            self._turns.append((decided_s - built_s) / (attempt.ratio.a + attempt.ratio.b))
        return True

    def _is_cut_off(self, sides: Sequence[Any]) -> bool:
        """Whether the end of the budget cut a turn of these sides short; the turns before it stay."""
        late = [side for side in sides if side.failure and side.failure.kind == "timeout"]
        if not late or self._left_s() > 0:
            return False
        for side in late:
            side.failure = side.failure if side.run is None else None
        return True

    def _settle(self, attempt: Attempt) -> None:
        """Count a change among those that were tried; one that is kept makes the fastest step (`best`)."""
        change, spec = attempt.change, attempt.base.spec
        if not attempt.kept and any(each.field in _MAKE_ROOM for each in attempt.along):
            self._given_room.add(change.made(spec))
        else:
            self._tried |= {(change.field, change.value), self._meaning(spec, change)}
        self.attempts.append(attempt)
        self.on_attempt(attempt)
        if attempt.kept:
            self.leave(attempt.base)

    def _take_first_turn(self, side: Any) -> None:
        """Where each turn has a process of its own, find out by one whether a step runs, on what and how fast."""
        if self.taking.session.alternating:
            self.taking.session.measure([side], self.steps)

    def _measure(self, sides: Sequence[Any], most_s: float = 0.0) -> None:
        """Measure two sides in turns until their difference is plain, or the second can no longer be found to save
        time; at most as many steps as were asked for. What that leaves open gets as many again, until `most_s` seconds
        have passed, or twice more: a comparison is worth as much time as it took to build the step."""

        def is_open(threshold: float) -> bool:
            ratio = self._ratio(sides, threshold)
            if ratio is None or ratio.low is None:
                return ratio is not None
            return ratio.decision not in ("lower", "higher") and ratio.low < 1 - _LEAST_GAIN

        began_s, alternates = self.clock(), not self._wait_together
        self.taking.session.measure(
            sides,
            self.steps,
            is_enough=lambda rounds: rounds >= FEWEST and not is_open(_PLAIN),
            alternates=alternates,
        )
        most_s = max(most_s, _MOST_ROUNDS * (self.clock() - began_s))
        while self.clock() - began_s < most_s and not self.taking.session.alternating and is_open(_LEAST_GAIN):
            self.taking.session.measure(sides, self.steps, alternates=alternates)
        if self.taking.session.alternating and not alternates:
            why = f"beside the fastest step: {self.taking.session.alternating}"
            sides[1].failure = Failure(kind="out_of_memory", message=why)
            self.taking.session.resume()

    @property
    def _wait_together(self) -> bool:
        """Whether the processes of all comparisons until now waited beside each other. A step that does not fit so is
        then dropped: processes that alternate would show no small gain, of it and of all after it."""
        ratios = [attempt.ratio for attempt in self.attempts if attempt.ratio]
        return bool(ratios) and all(ratio.threshold <= _LEAST_GAIN for ratio in ratios)

    def _ratio(self, sides: Sequence[Any], threshold: float = _LEAST_GAIN) -> Ratio | None:
        """The time of the second side over that of the first; None where one of them has failed. Where each turn has a
        process of its own, what such processes differ by is the least that can be told."""
        before, after = sides
        if before.run is None or after.run is None or before.failure or after.failure:
            return None
        return step_ratio(before.run, after.run, threshold=None if self.taking.session.alternating else threshold)

    def _look_at_best(self) -> None:
        if self.best.run and not self.best.failure:
            self.outlook.see(self.best.run)

    def _attempt(self, change: Change, promise: Promise | None, *, by_itself: bool = False) -> Attempt:
        """Build the fastest step with a change; `by_itself`: so that it is known whether it runs."""
        spec = self.best.spec
        self.on_change(change.words_along(spec))
        attempt = Attempt(change=change, base=self.best, promise=promise)
        try:
            side = self.taking.enter(change.words, change.made(spec))
            if by_itself:
                self._take_first_turn(side)
            attempt.side = side
        except UserError as error:  # the device, or this build of torch, does not do that
            attempt.failure = str(error)
        return attempt

    def _make_room(self) -> None:
        """Where the first step ran out of memory, add the changes that need less until it runs, or time is over."""
        for change in self.outlook.changes(self.start.spec) if _lacks_memory(self.start) else ():
            makes_room = change.field in _MAKE_ROOM or change.makes_room
            if not makes_room or change not in self._untried_of(self.best.spec):
                continue
            if not self._has_time(self._trial_s(None)):
                warn_caller(Remark(f"the budget was over before {change.words} was tried, which needs less memory"))
                return
            self._tried.add(_now(self.best.spec, change))  # what does not fit is not gone back to
            attempt = self._attempt(change, self.outlook.promise(self.best.spec, change), by_itself=True)
            if attempt.side is not None:
                if self._is_cut_off([attempt.side]):
                    self._say_that_it_was_cut_off(attempt)
                    return
                attempt.kept = attempt.side.failure is None or _lacks_memory(attempt.side)
                attempt.failure = failure_words(attempt.side.failure) if attempt.side.failure else None
                if not attempt.kept:
                    self.leave(attempt.side)
            self._settle(attempt)
            if not self.best.failure:
                return

    def _compare_ends(self, spec: StepSpec) -> None:
        """Measure the fastest step in turns with the first, if several changes lie between and there is time."""
        if len(self.kept) < 2 or not self._goes_on():
            return
        if self._has_time(self._trial_s(step_s(self.leave(self.start))) + self.outlook.compile_s(spec)):
            self.on_change("the step as given beside the fastest")
            self.again = self.taking.enter("start again", spec)
            self._measure([self.best, self.again])
            self.met = None if self._is_cut_off([self.best, self.again]) else self._ratio([self.again, self.best])
            self.leave(self.again)


def _now(spec: StepSpec, change: Change) -> tuple[str, str]:
    """The field of a change and its present value."""
    return change.field, str(FIELDS[change.field].read(spec))


def _lacks_memory(side: Any) -> bool:
    """Whether a step did not run because it ran out of memory; on a CPU the kernel then ends the process."""
    failure = side.failure
    return failure is not None and (failure.kind == "out_of_memory" or failure.signal == "SIGKILL")
