"""The walk from one step to a faster one: which change is tried next, and which is kept.

Each change is measured in turns with the fastest step until then, the one that promises most first; it is kept only if
the interval of the ratio says that it pays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from steplab.comparison.turns import step_ratio
from steplab.errors import UserError
from steplab.lab.explaining import failure_words
from steplab.lab.turns import StoredSession
from steplab.records.comparison import Ratio
from steplab.records.environment import Environment
from steplab.records.run import Run
from steplab.specs.changes import Change
from steplab.specs.resolve import with_fields
from steplab.specs.step import StepSpec

_MAKE_ROOM = ("attention", "loss", "precision")
"""Fields whose changes need less memory, where the first step does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """The predicted gain of a change."""

    share: float
    """Share of the step that it saves; negative if it costs time."""
    source: str
    """What predicts it."""


Forecast = Callable[[StepSpec, Change], Promise | None]
"""Predicts what a change of a step saves; None: it is not known."""


@dataclass(eq=False, kw_only=True)
class Attempt:
    """One change that was tried."""

    change: Change
    base: Any
    """The side of the step without it."""
    promise: Promise | None = None
    side: Any = None
    """The side of the step with it; None if it could not be built."""
    ratio: Ratio | None = None
    kept: bool = False
    failure: str | None = None


@dataclass(eq=False, kw_only=True)
class Walk:
    """A walk under way, and what it has found so far."""

    taking: StoredSession
    changes: Callable[[StepSpec], Sequence[Change]]
    """Gives the changes that apply to a step, in the order in which they are tried where nothing is predicted."""
    forecast: Forecast
    steps: int
    """Measured steps of each side in a comparison."""
    budget_s: float | None
    """Seconds after which no further change is tried; None: all are."""
    clock: Callable[[], float]
    on_change: Callable[[str], None] = lambda what: None
    """Called with what is measured next."""
    on_start: Callable[[Environment | None], None] = lambda environment: None
    """Called with the environment of the first step once that is built."""
    attempts: list[Attempt] = field(default_factory=list)
    runs: dict[int, Run] = field(default_factory=dict)
    """The record of each side that has left, by the side's identity."""
    start: Any = None
    """The side of the first step; None before it was built."""
    best: Any = None
    """The side of the fastest step until now; None: none has run."""
    overall: Ratio | None = None
    """Time of the fastest step over that of the first, measured in turns; None if they were not."""
    interrupted: KeyboardInterrupt | None = None
    """What ended the walk before its end; None: nothing."""
    _tried: set[Change] = field(default_factory=set)
    _longest_s: float = 0.0

    def go(self, spec: StepSpec) -> None:
        """Walk from a step until no change is left, or the time is over."""
        self._began_s = self.clock()
        self.on_change("the step as given")
        self.start = self.best = self.taking.enter("start", spec)
        self.on_start(self.start.environment)
        if self.best.failure:
            self._make_room()
        while self.best and not self.best.failure and (change := self._next()) and self._has_time():
            self._try(change)
        if self.best is not self.start and len(self._kept) > 1 and not self.start.failure and self._has_time():
            self._compare_ends(spec)

    @property
    def untried(self) -> list[Change]:
        """The changes of the fastest step that were not tried."""
        if self.best is None or self.best.failure:
            return []
        return self._untried_of(self.best.spec)

    def leave(self, side: Any) -> Run | None:
        """The record of a side, which is ended if it is still there; None if it had no turn before an interruption."""
        if self.interrupted and side.run is None and not side.failure:
            return None
        if id(side) not in self.runs:
            self.runs[id(side)] = self.taking.leave(side)
        return self.runs[id(side)]

    @property
    def _kept(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.kept]

    def _has_time(self) -> bool:
        """Whether another change can be tried, if it takes as long as the longest until now; it may take no longer
        than what is left."""
        if self.budget_s is None:
            return True
        left_s = self.budget_s - (self.clock() - self._began_s)
        self.taking.limit(max(left_s, 1.0))
        return left_s >= self._longest_s

    def _next(self) -> Change | None:
        """The change that promises most; after those, one of which nothing is predicted; last, one that should cost."""
        promises = [(change, self.forecast(self.best.spec, change)) for change in self.untried]

        def rank(entry: tuple[Change, Promise | None]) -> tuple[int, float]:
            promise = entry[1]
            return (1, 0.0) if promise is None else (0 if promise.share > 0 else 2, -promise.share)

        return min(promises, key=rank)[0] if promises else None

    def _try(self, change: Change) -> None:
        began_s = self.clock()
        attempt = self._attempt(change)
        if attempt.side is None:
            return
        self.taking.measure([self.best, attempt.side], self.steps)
        if attempt.side.run and self.best.run and not attempt.side.failure:
            attempt.ratio = step_ratio(self.best.run, attempt.side.run)
        attempt.kept = attempt.ratio is not None and attempt.ratio.decision == "lower"
        left = self.leave(self.best if attempt.kept else attempt.side)
        if attempt.kept:
            self.best = attempt.side
        elif attempt.ratio is None:
            attempt.failure = failure_words(left) if left and left.failure else "the step without it failed"
        self._longest_s = max(self._longest_s, self.clock() - began_s)

    def _attempt(self, change: Change) -> Attempt:
        """Build the fastest step with a change."""
        self._tried.add(change)
        self.on_change(change.words)
        attempt = Attempt(change=change, base=self.best, promise=self.forecast(self.best.spec, change))
        self.attempts.append(attempt)
        try:
            attempt.side = self.taking.enter(change.words, with_fields(self.best.spec, {change.field: change.value}))
        except UserError as error:  # the device, or this build of torch, does not do that
            attempt.failure = str(error)
        return attempt

    def _make_room(self) -> None:
        """Where the first step does not run, add the changes that need less memory until it does."""
        for change in self.changes(self.start.spec):
            if change.field not in _MAKE_ROOM or change not in self._untried_of(self.best.spec):
                continue
            attempt = self._attempt(change)
            if attempt.side is None:
                continue
            attempt.kept = True
            self.leave(self.best)
            self.best = attempt.side
            if not self.best.failure:
                return
            attempt.failure = self.best.failure.message

    def _untried_of(self, spec: StepSpec) -> list[Change]:
        return [change for change in self.changes(spec) if change not in self._tried]

    def _compare_ends(self, spec: StepSpec) -> None:
        """Measure the first step again, in turns with the fastest."""
        self.on_change("the step as given beside the fastest")
        again = self.taking.enter("start again", spec)
        self.taking.measure([self.best, again], self.steps)
        if again.run and not again.failure:
            self.overall = step_ratio(again.run, self.best.run)
        self.leave(again)


def step_s(run: Run | None) -> float | None:
    """Median step time in seconds; None without one."""
    step = run.timing.phase("step") if run and run.timing and not run.failure else None
    return median(step.best_s) if step and step.best_s else None
