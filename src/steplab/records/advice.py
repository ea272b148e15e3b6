"""The record of a walk from one step to the fastest that was found, one change at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

from steplab.records.comparison import Ratio
from steplab.records.finding import Finding
from steplab.records.problems import Problem
from steplab.records.record import StepRecord
from steplab.records.rows import Row, head, software, step_columns
from steplab.specs.changes import words_with
from steplab.specs.step import StepSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One change, measured in turns with the fastest step until then."""

    field: str
    """Field of the step that was changed, by its name in study files."""
    value: str
    """Its value with the change."""
    along: tuple[str, ...] = ()
    """Words of the changes that were made with it: what it needs, and others of the recipe `fast`."""
    code: tuple[str, ...]
    """Lines that it adds to a model and a training loop of the user's own."""
    numerics: str = ""
    """How the change affects the numbers beyond the order of additions; empty: not at all."""
    predicted_share: float | None = None
    """Predicted saving as a share of the step before; None: there was no prediction."""
    predicted_by: str = ""
    """What predicted it: plan time, plan layout, or the kind of a finding."""
    ratio: Ratio | None = None
    """Step time with the change over that without it; None if it was not compared."""
    waits_for_host: bool | None = None
    """Whether the device waited for the host in the step with the change; None: not known."""
    kept: bool = False
    """Whether the walk went on from the step with the change."""
    failure: str | None = None
    """Why there is no step time with the change, in one line."""
    peak_bytes: int | None = None
    """Peak memory of the step with the change: of the device, or on a CPU of the process; None: not known."""
    before_bytes: int | None = None
    """The same of the step without it."""
    run_id: str | None = None
    """Id of the record with the change; None: it could not be built."""
    base_id: str | None = None
    """Id of the record without it."""
    step_s: float | None = None
    """Median seconds of the step with it, where the step without it did not run; None: see `ratio`."""
    took_s: float | None = None
    """Seconds from building the step until the change was decided; None: not known."""

    @property
    def words(self) -> str:
        """The change in words, with what was changed along with it."""
        own, *others = self.all_words
        return words_with(own, others)

    @property
    def all_words(self) -> tuple[str, ...]:
        """The words of the change, and of each that was made along with it."""
        return (f"{self.field.removeprefix('model.')} {self.value}", *self.along)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Advice(StepRecord):
    """What `steplab advise` found; `spec` is the step that it began with."""

    best: StepSpec | None = None
    """The fastest step that was found; None if none ran."""
    start_id: str | None = None
    """Id of the record of the step that it began with."""
    best_id: str | None = None
    """Id of the record of the fastest step."""
    start_s: float | None = None
    """Median time of the first step in seconds, in the turns that `overall` is from; None if it did not run."""
    best_s: float | None = None
    """Median time of the fastest step in seconds, likewise."""
    overall: Ratio | None = None
    """Time of the fastest step over that of the first: measured in turns, or where time was over (a note says so) the
    product of the ratios of the changes that were kept; None if one of the two does not run."""
    tried: tuple[Tried, ...] = ()
    """The changes in the order in which they were tried."""
    untried: tuple[str, ...] = ()
    """Changes that apply and were not tried, because time was over or the walk was interrupted, the next one first."""
    untried_shares: tuple[float | None, ...] = ()
    """The predicted saving of each of them as a share of the fastest step; None: there was no prediction."""
    untried_fits: tuple[bool, ...] = ()
    """Whether each of them may fit the GPU; False: its step is predicted not to."""
    untried_s: float | None = None
    """Seconds that trying all of them takes, by what the trials before took; None: not known."""
    interrupted: bool = False
    """Whether the walk was interrupted before its end."""
    by_hand: tuple[Finding, ...] = ()
    """Findings whose change is no field of the step."""
    doubts: tuple[str, ...] = ()
    """Why the times of the first step and of the fastest are doubtful, a sentence each with the step and its record."""
    alternating: str | None = None
    """Why each turn had a process of its own; None: processes stayed alive."""
    schema: str = "steplab.advice/1"
    """Format of this record."""

    @property
    def kept(self) -> tuple[Tried, ...]:
        """The changes of the fastest step."""
        return tuple(tried for tried in self.tried if tried.kept)

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        if self.best is None and self.kept:
            yield ".best", "is missing, although changes were kept"


def advice_row(advice: Advice) -> Row:
    """The row of a walk: the fastest step that it found, and its time beside the first one's."""
    row = head(advice, "advise") | {"status": advice.status} | step_columns(advice.best or advice.spec)
    return row | {
        "device": advice.device_name,
        **software(advice),
        "step_time_s": advice.best_s,
        "start_s": advice.start_s,
        "num_tried": len(advice.tried),
        "num_kept": len(advice.kept),
        "failure": advice.failure.message if advice.failure else None,
    }
