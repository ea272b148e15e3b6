"""Rank changes to a step by predicted gain, and keep results of tried ones. `plan time` predicts gains (`plan layout`
for several processes), else a profile's findings do; `plan memory` predicts whether the changed step fits.
`specs.changes.ORDER` lists the ranks.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steplab.comparison.samples import SEPARATE
from steplab.costs.rates import Gpu, fitted_rates, gpu_named
from steplab.errors import SteplabError
from steplab.lab.explaining import explain
from steplab.lab.turns import LEAST_GAIN
from steplab.plan.host import compile_s, on_the_host_of
from steplab.plan.layout.time import layout_step_s
from steplab.plan.memory import predict_memory
from steplab.plan.time import predict_step_time
from steplab.records.comparison import Ratio
from steplab.records.environment import Environment
from steplab.records.finding import Finding
from steplab.records.prediction import FitVerdict
from steplab.records.run import Run
from steplab.records.timing import waits_for_host
from steplab.specs.attention_kernels import chosen_by_auto
from steplab.specs.changes import FREEING, LAUNCHING, ORDER, Change, changes_for
from steplab.specs.hardware import find_hardware
from steplab.specs.layout import SINGLE
from steplab.specs.step import FIELDS, StepSpec

_LEAST_TRIAL_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    share: float
    """Predicted saving, as a share of the step time."""
    source: str
    """Source of the prediction: a kind of finding, `plan time` or `plan layout`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    change: Change
    promise: Promise | None
    takes_s: float
    place: tuple[int, bool, float]


@dataclass(eq=False, kw_only=True)
class Attempt:
    change: Change
    base: Any
    promise: Promise | None
    side: Any = None
    ratio: Ratio | None = None
    kept: bool = False
    failure: str | None = None
    took_s: float = 0.0

    @property
    def along(self) -> tuple[Change, ...]:
        return self.change.brings(self.base.spec)

    @property
    def is_settled(self) -> bool:
        """True if the change was kept or failed, or if it saves no time and the device did not wait for Python."""
        if self.kept or self.ratio is None:
            return True
        return self.ratio.decision in ("higher", "same") and not waited(self.side)


@dataclass(eq=False, kw_only=True)
class Outlook:
    spec: StepSpec
    profile: Callable[[StepSpec], Run]
    """Measure and profile a step; used if `plan` has no prediction."""
    store: Path | str | None
    keep_precision: bool
    opt_in: Collection[str] = ()
    attempts: list[Attempt] = field(default_factory=list)
    gone: set[tuple[str, str]] = field(default_factory=set)
    """Field and value of changes that are not tried again, as given and with `auto` resolved."""
    _given_room: set[StepSpec] = field(default_factory=set)
    """Changed steps that did not pay with a memory-saving change joined; the main change may pay without it."""
    _gpu: Gpu | None = None
    _device_name: str = ""
    _device_kind: str = "cpu"
    _planned: dict[StepSpec, float | None] = field(default_factory=dict)
    _rooms: dict[StepSpec, FitVerdict | None] = field(default_factory=dict)
    _findings: Sequence[Finding] = ()
    _step_s: float | None = None

    # --- what is predicted --------------------------------------------------------------------------------

    def look(self, environment: Environment | None, *, may_profile: bool) -> None:
        """Read the first step's device. Without a predicted time, profile the step, if `may_profile`: there is time."""
        if environment is None:
            return
        self._device_kind, self._device_name = environment.device.kind, environment.device.name
        known = find_hardware(self._device_name)
        self._gpu = gpu_named(known.name) if known else None
        if self._planned_s(self.spec) is None and may_profile:
            run = self.profile(self.spec)
            if run.failure is None:
                found = explain(run, store=self.store)
                self._findings, self._step_s = found.findings, found.step_s

    def see(self, run: Run) -> None:
        if self._gpu is None or run.spec is None or self._planned_s(run.spec) is None:
            return
        gpu = on_the_host_of(run, self._gpu)
        if gpu is not self._gpu:
            self._gpu, self._planned = gpu, {}

    def compile_s(self, spec: StepSpec) -> float:
        """Predicted seconds of compilation; 0 if the number of blocks is unknown."""
        return compile_s(spec, (self._gpu.rates if self._gpu else fitted_rates()[0]).host)

    def promise(self, spec: StepSpec, change: Change) -> Promise | None:
        before_s = self._planned_s(spec)
        after_s = self._planned_s(change.made(spec)) if before_s else None
        if before_s and after_s:
            if spec.layout == SINGLE:
                return Promise(share=1 - after_s / before_s, source="plan time")
            # A plan of layouts does not know every choice; unknown ones have equal times.
            return Promise(share=1 - after_s / before_s, source="plan layout") if after_s != before_s else None
        for finding in self._findings:
            if finding.fields == {change.field: change.value} and finding.saves_s is not None and self._step_s:
                return Promise(share=finding.saves_s / self._step_s, source=finding.kind)
        return None

    def room(self, spec: StepSpec) -> FitVerdict | None:
        if self._gpu is None:
            return None
        if spec not in self._rooms:
            of_two = replace(spec, accumulation=min(spec.accumulation, 2))  # from the second on each holds the same
            try:  # steplab's model: tracing another would run it in this process
                cards = predict_memory(of_two, device=self._device_name).cards
            except SteplabError:
                cards = ()
            self._rooms[spec] = next((card.verdict for card in cards if card.gpu == self._gpu.name), None)
        return self._rooms[spec]

    def fits(self, spec: StepSpec, change: Change) -> bool:
        return self.room(change.made(spec)) != "does not fit"

    def by_hand(self, best: Run | None) -> tuple[Finding, ...]:
        found = self._findings or (explain(best, store=self.store).findings if best and not best.failure else ())
        return tuple(finding for finding in found if not finding.fields)

    def _planned_s(self, spec: StepSpec) -> float | None:
        if spec not in self._planned:
            self._planned[spec] = None
            try:
                if self._gpu and spec.layout == SINGLE:
                    self._planned[spec] = predict_step_time(spec, self._gpu).central_s
                elif self._gpu:
                    self._planned[spec] = layout_step_s(spec, self._gpu)
            except SteplabError:
                pass  # it cannot be predicted
        return self._planned[spec]

    # --- what is next -------------------------------------------------------------------------------------

    def changes(self, spec: StepSpec) -> list[Change]:
        return changes_for(spec, self._device_kind, keep_precision=self.keep_precision, opt_in=self.opt_in)

    def untried(self, spec: StepSpec) -> list[Change]:
        timed = {(attempt.change.field, attempt.change.value) for attempt in self.attempts if attempt.ratio}
        return [
            change
            for change in self.changes(spec)
            if not {(change.field, change.value), self._meaning(spec, change)} & self.gone
            and self._differs(spec, change)
            and not any((change.field, value) in timed for value in change.pointless_after)
        ]

    def candidates(self, best: Any, trial_s: float, *, alternating: bool) -> Iterator[Candidate]:
        """Untried changes, the most promising first; changes predicted not to fit come last. A trial takes `trial_s`
        seconds and compilation. With a process per turn (`alternating`), only savings above SEPARATE count. Memory is
        predicted on demand: a prediction takes up to a second.
        """
        spec = best.spec
        changes = (change for change in (*self.untried(spec), *self._rest_of_recipe(spec)) if not change.makes_room)
        found = [self._candidate(best, change, trial_s, alternating=alternating) for change in changes]
        found.sort(key=lambda each: each.place)
        yield from (each for each in found if self.fits(spec, each.change))
        yield from (each for each in found if not self.fits(spec, each.change))

    def settle(self, attempt: Attempt) -> None:
        change, spec = attempt.change, attempt.base.spec
        if not attempt.kept and any(each.field in FREEING for each in attempt.along):
            self._given_room.add(change.made(spec))
        else:
            self.gone |= {(change.field, change.value), self._meaning(spec, change)}
        self.attempts.append(attempt)

    def _candidate(self, best: Any, change: Change, trial_s: float, *, alternating: bool) -> Candidate:
        spec, least = best.spec, SEPARATE if alternating else LEAST_GAIN
        if self._saves(spec, change, least) and not self.fits(spec, change):
            change = self._with_room(spec, change, least)
        promise, made = self.promise(spec, change), change.made(spec)
        share, takes_s = promise.share if promise else None, trial_s + self.compile_s(made)
        settles, weight = False, max(takes_s, _LEAST_TRIAL_S)
        if share is not None and share > least:
            rank = "tight" if self.room(made) == "too tight to promise" else "saves"
            settles, weight = change.field in LAUNCHING and bool(waited(best)), -share / weight
        elif change.is_fast(spec, self._device_kind) and (share is None or not alternating):
            rank = "recipe"
        else:
            rank = "unknown" if share is None else "little" if share > 0 else "costs"
        place = (list(ORDER).index(rank), not settles, weight)
        return Candidate(change=change, promise=promise, takes_s=takes_s, place=place)

    def _saves(self, spec: StepSpec, change: Change, least: float) -> bool:
        promise = self.promise(spec, change)
        return promise is not None and promise.share > least

    def _with_room(self, spec: StepSpec, change: Change, least: float) -> Change:
        """Join a change whose step does not fit with a memory-saving change that keeps the numbers, if both together
        may fit. A memory-saving change that also saves time is tried alone first.
        """
        if self.room(spec) == "does not fit":
            return change  # the fastest step runs, so that the prediction is wrong
        for other in self.changes(spec):
            if other.field not in FREEING or other.field in change.fields or other.numerics:
                continue
            if (other.field, other.value) not in self.gone and self._saves(spec, other, least):
                return change
            both = change.joined([other])
            if both.is_supported(spec) and both.made(spec) not in self._given_room and self.fits(spec, both):
                return both
        return change

    def _rest_of_recipe(self, spec: StepSpec) -> Iterator[Change]:
        """The recipe's remaining settings as one change, once one alone did not pay: noise may hide a small saving."""
        settled = {name for attempt in self.attempts if attempt.is_settled for name in attempt.change.fields}
        recipe = [each for each in self.changes(spec) if each.is_fast(spec, self._device_kind)]
        lacking = [each for each in recipe if each.field not in settled and self._differs(spec, each)]
        brought = {need for each in lacking for need in each.needs.items()}
        parts = [each for each in lacking if (each.field, each.value) not in brought]
        if len(parts) < 2 or all((part.field, part.value) not in self.gone for part in parts):
            return
        rest = parts[0].joined(parts[1:])
        if rest.is_supported(spec) and not any(rest.fields <= attempt.change.fields for attempt in self.attempts):
            yield rest

    def _differs(self, spec: StepSpec, change: Change) -> bool:
        return self._meaning(spec, change)[1] != self._meant(spec, *now(spec, change))

    def _meaning(self, spec: StepSpec, change: Change) -> tuple[str, str]:
        return change.field, self._meant(spec, change.field, change.value)

    def _meant(self, spec: StepSpec, name: str, value: str) -> str:
        if (name, value) == ("reshard_after_forward", "auto"):
            return "always" if replace(spec, reshard_after_forward="auto").reshards else "never"
        if (name, value) != ("attention", "auto") or spec.model.shape is None:
            return value
        return chosen_by_auto(spec, spec.model.shape, self._device_name).implementation


def now(spec: StepSpec, change: Change) -> tuple[str, str]:
    return change.field, str(FIELDS[change.field].read(spec))


def waited(side: Any) -> bool | None:
    """True if the device waited for Python; None: not measured."""
    timing = side.run.timing if side and side.run else None
    return waits_for_host(timing.back_to_back) if timing else None


def step_s(run: Run | None) -> float | None:
    return run.median_s if run and not run.failure else None
