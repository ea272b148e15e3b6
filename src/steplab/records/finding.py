"""One diagnosis of a run: what was seen, why it matters, what to change, what that should give."""

from dataclasses import dataclass, field

FINDINGS_SCHEMA = "steplab.findings/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One figure a finding rests on."""

    what: str
    """'idle while the host launches, forward'."""
    value: float
    """In base units."""
    unit: str
    """s, B, FLOP, %, '' for a count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The finding's change, measured; or why it could not be."""

    before_s: float
    """Median step time measured again without the change, in the same session."""
    after_s: float | None
    """Median step time with it; None if that step failed."""
    run_ids: tuple[str, ...]
    """The records: without the change and, where it was measured at all, with it."""
    tokens_ratio: float = 1.0
    """Tokens of a step with the change over those of a step without it: a larger batch does more in its step."""
    failure: str | None = None
    """Why there is no time with the change, in one line."""

    @property
    def saved_s(self) -> float | None:
        """Seconds that the change saves of a step's tokens; negative if it costs time, None if it failed."""
        return None if self.after_s is None else self.before_s - self.after_s / self.tokens_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One diagnosis."""

    kind: str
    """launch_bound, scores_materialised, ...: the file in `explain` that made it."""
    title: str
    """One line: what is wrong."""
    saw: str
    """The evidence in words, with figures and units."""
    why: str
    """Why it matters, for someone who meets it for the first time."""
    change: str
    """What to do, as the user would type or write it."""
    evidence: tuple[Evidence, ...]
    """The figures `saw` speaks of, times and counts a step."""
    note: str = ""
    """What else to know of the change: how it is written in one's own code, what it risks."""
    saves_s: float | None = None
    """Predicted seconds a step the change saves (for a change of batch: of the tokens of a step as it is now); None
    where it cannot be said."""
    at_most: bool = False
    """Whether saves_s is a bound from above rather than an estimate."""
    prediction: str = ""
    """How that was predicted, and what it leaves out."""
    fields: dict[str, str] = field(default_factory=dict)
    """Spec fields of the change, by their outer names ({'compile': 'default'}); empty: no field does it."""
    trial: Trial | None = None
    """Predicted against measured, once it was tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """All that was found in one run."""

    run_id: str
    """The run."""
    created_utc: str
    """ISO 8601, UTC, when it was explained."""
    steplab_version: str
    """Version whose diagnoses these are."""
    step_s: float | None
    """Median step time of the run, unprofiled; None where it was not timed."""
    findings: tuple[Finding, ...]
    """Largest predicted gain first, those without a prediction last."""
    not_looked_at: tuple[str, ...] = ()
    """What the record lacks, what that kept from being diagnosed, and how to get it."""
    schema: str = field(default=FINDINGS_SCHEMA)
    """Format of this record."""
