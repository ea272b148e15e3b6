"""The answer of a profile: what would save time, by the findings on its run, or else where the time goes."""

from collections.abc import Iterator, Mapping, Sequence

from steplab import units
from steplab.records.finding import Finding, Findings
from steplab.records.run import Run
from steplab.report.kit.document import Bar, Bars, Column, Fact, Section, Segment, Table
from steplab.report.kit.quantities import PERCENT
from steplab.report.profile.words import largest_categories, time_sentence
from steplab.report.run.cells import RunCell, label
from steplab.specs.step_fields import option_name

_MOST_TOLD = 3
_NOTE = (
    "Predicted saving per step of each change alone; the savings do not add up. `steplab explain {}` has the evidence."
)
_COLOR = 1
_LEAST = 0.01
"""Share of the step from which a saving is worth a headline."""


def finding_sentences(run: Run, findings: Findings | None) -> Iterator[str]:
    """What would save most and what comes next; without findings, where the time goes."""
    if findings is None or not findings.findings:
        if run.failure:
            yield "The run failed, so there is no step to explain."
        elif run.profile is None and run.median_s is None:
            yield "No step was timed and none was profiled, so there is nothing to explain."
        elif findings is not None:
            by = "" if run.profile else ", by the few diagnoses that need no profile"
            yield f"No change is predicted to save a considerable share of the step{by}."
        if run.profile:
            yield time_sentence(run, run.profile)
            yield largest_categories(run, run.profile)
        return
    worth = [finding for finding in findings.findings if _is_worth(finding, findings.step_s)]
    if not worth:
        yield f"No change saves {units.format_limit(_LEAST)} of the step."
        return
    first, *others = worth[:_MOST_TOLD]
    yield saving_sentence(first, findings.step_s)
    if others:
        yield f"Next: {'; '.join(f'{finding.title} ({saved_words(finding)})' for finding in others)}."


def _is_worth(finding: Finding, step_s: float | None) -> bool:
    """Whether a finding belongs in a headline."""
    return finding.gain_s is None or finding.gain_s >= _LEAST * (step_s or 0.0)


def saving_sentence(finding: Finding, step_s: float | None) -> str:
    """What was found, and what a change saves."""
    return f"{finding.title}: {_saving(finding, step_s)}."


def _saving(finding: Finding, step_s: float | None) -> str:
    if finding.saves_s is None:
        return "its saving cannot be predicted from this record"
    change = " ".join(f"{option_name(name)} {value}" for name, value in finding.fields.items()) or "changing that"
    behind = f", after the change for {finding.after}" if finding.after else ""
    return f"{change} saves {saving_words(finding, step_s)}{behind}"


def saving_words(finding: Finding, step_s: float | None) -> str:
    """'about 3.00 ms of 30.0 ms per step, 10.0 %'; of a larger batch, whose step is longer, 'about 3.00 ms for the same
    tokens, 10.0 % of 30.0 ms'. The finding predicts a saving."""
    saved, gain_s = saved_words(finding), finding.gain_s
    if step_s is None or gain_s is None:
        return f"{saved} per step" if finding.tokens_ratio == 1 else saved
    step, share = units.format_time(step_s), units.format_percent(gain_s / step_s)
    return f"{saved} of {step} per step, {share}" if finding.tokens_ratio == 1 else f"{saved}, {share} of {step}"


def saved_words(finding: Finding) -> str:
    """'about 12.3 ms', 'at most 4.56 ms', 'a measured 3.21 ms'; of a larger batch, 'about 7.89 ms for the same
    tokens'."""
    gain_s, trial = finding.gain_s, finding.trial
    if gain_s is None:
        return f"{units.format_time(finding.alone_s)} alone" if finding.alone_s is not None else "not predicted"
    tokens = "" if finding.tokens_ratio == 1 else " for the same tokens"
    how = "a measured" if trial and trial.saved_s is not None else "at most" if finding.at_most else "about"
    return f"{how} {units.format_time(gain_s)}{tokens}"


def saving_facts(cells: Sequence[RunCell], findings: Mapping[str, Findings], fields: Sequence[str]) -> list[Fact]:
    """The largest saving, as a share of its step, that is predicted of a run of a page; empty where none is."""
    predicted = [
        (finding.saves_s / found.step_s, cell, found)
        for cell in cells
        if (found := findings.get(cell.run.id)) and found.step_s and found.findings
        if (finding := found.findings[0]).saves_s is not None
    ]
    if not predicted:
        return []
    share, cell, found = max(predicted, key=lambda one: one[0])
    told = saving_sentence(found.findings[0], found.step_s)
    text = f"of a step is the most that one change is predicted to save: {label(cell, fields)}. {told}"
    return [Fact(figure=units.format_percent(share), text=text, wide=True)]


def findings_section(findings: Findings) -> Section:
    """The findings as bars of what each would save, and as a table with the changes."""
    bars = tuple(
        Bar(
            label=finding.title,
            figure=saved_words(finding),
            segments=(Segment(value=finding.saves_s, color=_COLOR, tip=saved_words(finding)),)
            if finding.saves_s
            else (),
            detail=finding.change,
            strong=place == 0,
        )
        for place, finding in enumerate(findings.findings)
    )

    def share(finding: Finding) -> float | None:
        return finding.saves_s / findings.step_s if finding.saves_s and findings.step_s else None

    table = Table.of(
        "findings",
        findings.findings,
        (
            Column(key="title", header="finding", wraps_from=30),
            Column(key="saves", value=saved_words),
            Column(key="share", header="of the step", quantity=PERCENT, value=share),
            Column(key="change", wraps_from=24, rank=1),
        ),
        caption=_NOTE.format(findings.run_id),
        folded=True,
    )
    chart = Bars(bars=bars, note="Predicted saving per step.", full=findings.step_s)
    return Section.of("What would save time", chart, table)
