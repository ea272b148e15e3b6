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
    """One change, alternated with the fastest step so far."""

    field: str
    """Changed field, by its name in study files."""
    value: str
    along: tuple[str, ...] = ()
    """Words of changes made with it: its requirements, and others of the recipe `fast`."""
    code: tuple[str, ...]
    """Lines that it adds to your own model and training loop."""
    numerics: str = ""
    """Effect on numbers beyond the order of additions; empty: none."""
    predicted_share: float | None = None
    """Predicted saving as a share of the step before; None: no prediction."""
    predicted_by: str = ""
    """Source of the prediction: plan time, plan layout, or the kind of a finding."""
    ratio: Ratio | None = None
    """Step time with the change over without; None: not compared."""
    waits_for_host: bool | None = None
    kept: bool = False
    """True if later changes built on it."""
    failure: str | None = None
    peak_bytes: int | None = None
    """Peak memory with the change: the device's, or on a CPU the process's; None: unknown."""
    before_bytes: int | None = None
    """The same without the change."""
    run_id: str | None = None
    """Id of the record with the change; None: it could not be built."""
    base_id: str | None = None
    """Id of the record without it."""
    step_s: float | None = None
    """Median seconds with the change, if the step without it failed; None: see `ratio`."""
    took_s: float | None = None
    """Seconds from building the step to the decision; None: unknown."""

    @property
    def words(self) -> str:
        own, *others = self.all_words
        return words_with(own, others)

    @property
    def all_words(self) -> tuple[str, ...]:
        """The change and those made with it."""
        return (f"{self.field.removeprefix('model.')} {self.value}", *self.along)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Advice(StepRecord):
    """Result of `steplab advise`; `spec` is the first step."""

    best: StepSpec | None = None
    start_id: str | None = None
    best_id: str | None = None
    start_s: float | None = None
    """Median seconds of the first step, from the turns of `overall`; None if it failed."""
    best_s: float | None = None
    overall: Ratio | None = None
    """Time of the fastest step over the first: alternating, or out of time (see notes) the product of the kept ratios.
    None if either fails.
    """
    tried: tuple[Tried, ...] = ()
    untried: tuple[str, ...] = ()
    """Applicable changes not tried, in order, for lack of time or after an interruption."""
    untried_shares: tuple[float | None, ...] = ()
    """Predicted saving of each untried change as a share of the fastest step; None: no prediction."""
    untried_fits: tuple[bool, ...] = ()
    """False if a step is predicted not to fit the GPU."""
    untried_s: float | None = None
    """Seconds for trying all of them, estimated from earlier trials; None: unknown."""
    interrupted: bool = False
    by_hand: tuple[Finding, ...] = ()
    """Findings with a change outside the step's fields."""
    doubts: tuple[str, ...] = ()
    """Reasons to doubt the first and fastest times: a sentence each, with step and record."""
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
