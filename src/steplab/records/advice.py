"""The record of `steplab advise`."""

from collections.abc import Iterator
from dataclasses import dataclass

from steplab.records.comparison import Ratio
from steplab.records.figure import Figure
from steplab.records.finding import Finding
from steplab.records.record import Problem, StepRecord
from steplab.specs.changes import words_with
from steplab.specs.step import StepSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """Trial of one change, alternated with the fastest step so far."""

    field: str
    """Changed field, as in study files."""
    value: str
    along: tuple[str, ...] = ()
    """Further changes in the same trial: those that the change requires, or all other parts of the recipe `fast`."""
    code: tuple[str, ...]
    """Lines that make the change in your own model and training loop."""
    numerics: str = ""
    """Effect on the results beyond the order of additions; empty: none."""
    predicted_share: float | None = None
    """Predicted saving as a share of the step time without the change; None: no prediction."""
    predicted_by: str = ""
    """Source of `predicted_share`: plan time, plan layout, or the kind of a finding."""
    ratio: Ratio | None = None
    """Step time with the change over step time without it; None: not measured."""
    waits_for_host: bool | None = None
    kept: bool = False
    """True if the change became part of the fastest step."""
    failure: str | None = None
    peak_bytes: int | None = None
    """Peak device memory with the change, or process memory on a CPU; None: unknown."""
    before_bytes: int | None = None
    """`peak_bytes` of the step without the change."""
    run_id: str | None = None
    """Id of the record with the change; None: the step could not be built."""
    base_id: str | None = None
    """Id of the record without the change."""
    step_s: float | None = None
    """Median seconds with the change if the step without it failed; else None (see `ratio`)."""
    took_s: float | None = None
    """Seconds that the trial took, including building the step; None: unknown."""

    @property
    def words(self) -> str:
        own, *others = self.all_words
        return words_with(own, others)

    @property
    def all_words(self) -> tuple[str, ...]:
        return (f"{self.field.removeprefix('model.')} {self.value}", *self.along)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Advice(StepRecord):
    """Result of `steplab advise`; the inherited `spec` is the step before any change."""

    best: StepSpec | None = None
    start_id: str | None = None
    best_id: str | None = None
    start_s: float | None = None
    """Median seconds of a step of `spec`, measured together with the fastest step (`overall`); None if it failed."""
    best_s: float | None = None
    overall: Ratio | None = None
    """Time of the fastest step over the time of `spec`, alternating; if time ran out (see notes), the product of the
    kept trials' ratios. None if either failed.
    """
    tried: tuple[Tried, ...] = ()
    untried: tuple[str, ...] = ()
    """Applicable changes left untried after a timeout or an interruption, in planned order."""
    untried_shares: tuple[float | None, ...] = ()
    """Predicted saving per change in `untried`, as a share of the fastest step; None: no prediction."""
    untried_fits: tuple[bool, ...] = ()
    """Per change in `untried`, False if the step with it is predicted not to fit in GPU memory."""
    untried_s: float | None = None
    """Estimated seconds for trying all of `untried`, from the trials so far; None: unknown."""
    interrupted: bool = False
    by_hand: tuple[Finding, ...] = ()
    """Findings whose change no field of the spec can express, so that you must make it yourself."""
    doubts: tuple[str, ...] = ()
    """Reasons to doubt the times of the first and the fastest step, as sentences."""
    alternating: str | None = None
    schema: str = "steplab.advice/1"

    @property
    def kept(self) -> tuple[Tried, ...]:
        return tuple(tried for tried in self.tried if tried.kept)

    def problems(self) -> Iterator[Problem]:
        if self.best is None and self.kept:
            yield ".best", "is missing, although changes were kept"


ADVICE_ROW: tuple[Figure[Advice], ...] = (
    Figure(key="step_time_s", find=lambda advice: advice.best_s),
    Figure(key="start_s", find=lambda advice: advice.start_s),
    Figure(key="num_tried", find=lambda advice: len(advice.tried)),
    Figure(key="num_kept", find=lambda advice: len(advice.kept)),
)
