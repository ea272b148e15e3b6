"""Diagnoses of a run: the evidence, the explanation, the proposed change and its predicted gain."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One figure that supports a finding."""

    what: str
    """What the figure is, such as 'idle while the host launches, forward'."""
    value: float
    """The figure in its base unit."""
    unit: str
    """The unit: s, B, FLOP, %, or '' for a count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The measured effect of a finding's change, or why it could not be measured."""

    before_s: float
    """Median step time in seconds without the change, measured again in turns with the change."""
    after_s: float | None
    """Step time in seconds with the change: `before_s` times the ratio of the two, from which is taken out what slowed
    both (comparison.samples); None if that step failed."""
    least_saved_s: float | None = None
    """Lower end of the 95 % interval of `saved_s`; None: there is no interval."""
    most_saved_s: float | None = None
    """Upper end of that interval; None: there is no interval."""
    run_ids: tuple[str, ...]
    """Ids of the records: without the change and, if it was measured, with it."""
    tokens_ratio: float = 1.0
    """Tokens per step with the change divided by those without it; a change of batch size makes it differ from 1."""
    failure: str | None = None
    """Why there is no time with the change, in one line."""
    alternating: str | None = None
    """Why each turn had a process of its own (records.turns); None: processes stayed alive."""

    @property
    def saved_s(self) -> float | None:
        """Seconds saved on the tokens of a step without the change; negative if the change costs time, None if it
        failed."""
        return None if self.after_s is None else self.before_s - self.after_s / self.tokens_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One diagnosis."""

    kind: str
    """Kind of the finding, the name of its diagnosis in `explain`, such as launch_bound or scores_materialised."""
    title: str
    """What is wrong, in one line."""
    saw: str
    """The evidence in words, with figures and units."""
    why: str
    """Why it matters, for a reader who does not know the problem."""
    change: str
    """The proposed change, as the user would type or write it."""
    evidence: tuple[Evidence, ...]
    """The figures that `saw` mentions; times and counts are per step."""
    note: str = ""
    """Remarks on the change, such as how to write it in one's own code, and its risks."""
    saves_s: float | None = None
    """Predicted seconds that the change saves per step (for a change of batch: per tokens of a present step); None if
    there is no prediction."""
    limited_from_s: float | None = None
    """Predicted seconds that the change saves alone, where the changes before it leave less of the step; None:
    `saves_s` is that."""
    tokens_ratio: float = 1.0
    """Tokens per step with the change divided by those without it; above 1 the step itself gets longer, and `saves_s`
    is what its tokens take less."""
    at_most: bool = False
    """Whether `saves_s` is an upper bound rather than an estimate."""
    prediction: str = ""
    """How the gain was predicted, and what the prediction leaves out."""
    fields: dict[str, str] = field(default_factory=dict)
    """Fields of the spec that make the change, by the names of study files, such as {'compile': 'default'}; empty: no
    field makes it."""
    after: str = ""
    """Kind of the finding whose change must be made first; empty: none."""
    trial: Trial | None = None
    """Measured effect of the change; None: it was not tried."""

    @property
    def alone_s(self) -> float | None:
        """Predicted seconds that the change saves alone, which a trial measures; None: no prediction."""
        return self.saves_s if self.limited_from_s is None else self.limited_from_s

    @property
    def gain_s(self) -> float | None:
        """Seconds that the change saves per step: as measured where it was tried, else as predicted."""
        return self.trial.saved_s if self.trial and self.trial.saved_s is not None else self.saves_s


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The largest gain first, unknown gains last; before a change comes the one that must precede it."""
    found = sorted(findings, key=lambda one: -math.inf if one.gain_s is None else one.gain_s, reverse=True)
    for finding in list(found):
        first = next((one for one in found if finding.after == one.kind), None)
        if first is not None and found.index(first) > found.index(finding):
            found.remove(first)
            found.insert(found.index(finding), first)
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Findings:
    """All findings on one run."""

    run_id: str
    """Id of the run."""
    created_utc: str
    """Time of the diagnosis: ISO 8601, UTC."""
    steplab_version: str
    """Version of steplab that made the diagnoses."""
    step_s: float | None
    """Median step time of the run in seconds, without a profiler; None if it was not timed."""
    findings: tuple[Finding, ...]
    """The findings, as `in_order` puts them."""
    not_looked_at: tuple[str, ...] = ()
    """What the record lacks, what could not be diagnosed without it, and how to record it."""
    schema: str = "steplab.findings/1"
    """Format of this record."""

    def __repr__(self) -> str:
        told = "; ".join(finding.title for finding in self.findings[:3]) or "nothing found"
        more = f"; and {len(self.findings) - 3} more" if len(self.findings) > 3 else ""
        return f"<{type(self).__name__} on run {self.run_id}: {told}{more}>"
