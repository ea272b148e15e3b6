"""Diagnoses of a run: evidence, explanation, proposed change, predicted saving."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    what: str
    """Description of the number, such as 'idle while the host launches, forward'."""
    value: float
    unit: str
    """s, B, FLOP, %, or '' for a count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Measured effect of a finding's change, or the failure of its measurement."""

    before_s: float
    """Median step seconds without the change; both steps alternated."""
    after_s: float | None
    """Step seconds with the change: `before_s` times the measured ratio, corrected for slowdowns common to both steps
    (comparison.samples). None: the step failed.
    """
    least_saved_s: float | None = None
    """Lower end of the 95 % interval of `saved_s`; None: no interval."""
    most_saved_s: float | None = None
    run_ids: tuple[str, ...]
    """Ids of the records: without the change, then with it if measured."""
    tokens_ratio: float = 1.0
    """Tokens per step with the change over tokens per step without it; not 1 if the batch changes."""
    failure: str | None = None
    alternating: str | None = None
    """Why each turn had its own process (records.timing); None: it had not."""

    @property
    def saved_s(self) -> float | None:
        """Seconds saved on the tokens of one step without the change; negative if slower, None if failed."""
        return None if self.after_s is None else self.before_s - self.after_s / self.tokens_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    kind: str
    """Diagnosis in `explain`, such as launch_bound or scores_materialised."""
    title: str
    saw: str
    why: str
    change: str
    """Change to make, as a command line or code."""
    evidence: tuple[Evidence, ...]
    """Numbers that `saw` mentions; times and counts are per step."""
    note: str = ""
    saves_s: float | None = None
    """Predicted seconds saved per step, on the tokens of the present step; None: no prediction."""
    limited_from_s: float | None = None
    """Predicted seconds that this change alone saves, if they exceed what the findings before it leave of the step
    (`saves_s`). None: equal to `saves_s`.
    """
    tokens_ratio: float = 1.0
    """Tokens per step with the change over tokens per step without it. Above 1 the step gets longer; `saves_s` is then
    the time saved on as many tokens as a step has now.
    """
    at_most: bool = False
    prediction: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    """Spec fields of the change, as in study files: {'compile': 'default'}."""
    after: str = ""
    """Kind of the finding whose change should come first; empty: none."""
    includes: str = ""
    """Kind of the finding whose saving is part of `saves_s`; empty: none."""
    trial: Trial | None = None

    @property
    def alone_s(self) -> float | None:
        """Predicted seconds that this change alone saves, as in its trial; None: no prediction."""
        return self.saves_s if self.limited_from_s is None else self.limited_from_s

    @property
    def gain_s(self) -> float | None:
        return self.trial.saved_s if self.trial and self.trial.saved_s is not None else self.saves_s


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort by gain, largest first and unknown last; a finding that another names in `after` comes before it."""
    found = sorted(findings, key=lambda one: -math.inf if one.gain_s is None else one.gain_s, reverse=True)
    for finding in list(found):
        first = next((one for one in found if finding.after == one.kind), None)
        if first is not None and found.index(first) > found.index(finding):
            found.remove(first)
            found.insert(found.index(finding), first)
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Findings:
    run_id: str
    created_utc: str
    steplab_version: str
    step_s: float | None
    """Median step seconds without a profiler; None: not timed."""
    findings: tuple[Finding, ...]
    not_looked_at: tuple[str, ...] = ()
    """Data that the record lacks, the diagnoses that need it, and how to record it."""
    schema: str = "steplab.findings/1"

    def __repr__(self) -> str:
        told = "; ".join(finding.title for finding in self.findings[:3]) or "nothing found"
        more = f"; and {len(self.findings) - 3} more" if len(self.findings) > 3 else ""
        return f"<{type(self).__name__} on run {self.run_id}: {told}{more}>"
