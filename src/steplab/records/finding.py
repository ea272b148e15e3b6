"""One diagnosis of a run: what was seen, why it matters, what to change, what that should give."""

from dataclasses import dataclass, field

FINDINGS_SCHEMA = "steplab.findings/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One figure a finding rests on."""

    what: str
    """'idle while the host launches, forward'."""
    value: float
    unit: str
    """s, B, FLOP, %, '' for a count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The finding's change, measured."""

    before_s: float
    """Median step time measured again without the change, in the same session."""
    after_s: float
    """Median step time with it."""
    run_ids: tuple[str, str]
    """The two records."""

    @property
    def saved_s(self) -> float:
        """Seconds a step that the change saved; negative if it cost time."""
        return self.before_s - self.after_s


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
    """The figures `saw` speaks of."""
    saves_s: float | None = None
    """Predicted seconds a step the change saves; None where it cannot be said."""
    prediction: str = ""
    """How that was predicted, and what it leaves out."""
    fields: dict[str, str] = field(default_factory=dict)
    """Spec fields of the change, by their outer names ({'compile': 'default'}); empty: no field does it."""
    trial: Trial | None = None
    """Predicted against measured, once it was tried."""
