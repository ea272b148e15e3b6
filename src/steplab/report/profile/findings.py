"""The report of findings: each with its gain, its reason and its change, then the results of trials."""

from collections.abc import Iterator

from steplab import units
from steplab.records.finding import Evidence, Finding, Findings
from steplab.records.rows import Row
from steplab.records.run import Run
from steplab.report.kit.document import Column, Document, Pairs, Section, Sentences, Table, Verdict, row_of
from steplab.report.kit.quantities import TIME, Quantity
from steplab.report.profile.verdict import finding_sentences, saved_words, saving_words
from steplab.report.run.verdict import run_cautions
from steplab.report.run.words import run_title

_SAME_STEP = 0.20
"""Relative difference between the step measured again and the recorded one above which the machine, its clocks or its
load must have changed: repeated medians of one step differ by a few per cent."""
_CAPTION = (
    "Each gain is predicted as if no other change were made, as far as those before it leave as much of the step."
)
_TO_TRY = "`--try` measures the changes that are options of the step."
_SIGNED = Quantity(units.format_change)


def findings_document(run: Run, findings: Findings) -> Document:
    """All that was found in a run."""
    found = findings.findings
    caption = f"{_CAPTION} {_TO_TRY}" if any(finding.fields for finding in found) else _CAPTION
    return Document(
        title=run_title(run),
        subtitle=f"run {run.id} · {run.created_utc} · explained by steplab {findings.steplab_version}",
        verdict=Verdict(sentences=tuple(finding_sentences(run, findings)), cautions=tuple(run_cautions(run))),
        sections=(
            *(_finding(number, finding, findings.step_s) for number, finding in enumerate(found, start=1)),
            Section.of("Time saved per step, predicted and measured", trials_table(findings), *_changed_step(findings)),
            Section.of("", Sentences.of([caption] if found else [], "note")),
            Section.notes(findings.not_looked_at, "Not looked at"),
        ),
        data=list(map(_row, found)),
    )


def _row(finding: Finding) -> Row:
    """One row per finding, for programs that read tables; the record itself has more."""
    return {
        **row_of(finding, "kind", "title", "saves_s", "at_most", "change"),
        **row_of(finding.trial, "before_s", "after_s", "tokens_ratio"),
        **row_of(finding.trial, "saved_s", "least_saved_s", "most_saved_s", "failure"),
    }


def _finding(number: int, finding: Finding, step_s: float | None) -> Section:
    prediction = f"Prediction: {finding.prediction}"
    return Section.of(
        f"{number}. {finding.title}",
        Sentences.of([_gain(finding, step_s), finding.saw, finding.why, prediction]),
        Sentences.of([finding.change], "code"),
        Sentences.of([finding.note], "note"),
        Pairs(pairs=(("kind", finding.kind), *((e.what, _figure(e)) for e in finding.evidence))),
        _trial_words(finding) if finding.trial else None,
    )


def _gain(finding: Finding, step_s: float | None) -> str:
    if finding.saves_s is None:
        if finding.limited_from_s is not None:
            return f"It saves {saved_words(finding)}, but the changes before it leave nothing of the step."
        return "What the change saves cannot be predicted from this record."
    return f"The change saves {saving_words(finding, step_s)}."


def _figure(evidence: Evidence) -> str:
    value = evidence.value
    if evidence.unit == "s":
        return units.format_time(value)
    if evidence.unit == "B":
        return units.format_bytes(value)
    if evidence.unit == "%":
        return units.format_percent(value / 100)
    if evidence.unit:
        return units.format_rate(value, evidence.unit)
    return f"{value:.0f}" if value == round(value) or value >= 100 else units.three_digits(value)


# --- trials -----------------------------------------------------------------------------------------------


def _trial_words(finding: Finding) -> str:
    trial = finding.trial
    assert trial is not None
    if trial.after_s is None or trial.saved_s is None:
        return f"Tried: no result, {trial.failure}"
    per = "" if trial.tokens_ratio == 1 else f" for {trial.tokens_ratio:g} times the tokens"
    predicted = f" where {_predicted(finding)} were predicted" if finding.alone_s is not None else ""
    between = ""
    if trial.least_saved_s is not None and trial.most_saved_s is not None:
        ends = f"{units.format_time(trial.least_saved_s)} to {units.format_time(trial.most_saved_s)}"
        between = f" (95 % interval {ends})"
    alone = f" Each turn was a process of its own, because {trial.alternating}." if trial.alternating else ""
    return (
        f"Tried: {units.format_time(trial.before_s)} became {units.format_time(trial.after_s)}{per}, "
        f"saving {units.format_time(trial.saved_s)}{between}{predicted}.{alone}"
    )


def _predicted(finding: Finding) -> str | None:
    if finding.alone_s is None:
        return None
    return f"{'at most ' if finding.at_most else ''}{units.format_time(finding.alone_s)}"


def trials_table(findings: Findings) -> Table:
    """One row per finding that was tried."""
    return Table(
        name="trials",
        columns=(
            Column(key="kind", header="finding"),
            Column(key="change"),
            Column(key="predicted", quantity=TIME),
            Column(key="measured", quantity=TIME),
            Column(key="least", header="from", quantity=TIME, rank=3),
            Column(key="most", header="to", quantity=TIME, rank=3),
            Column(key="error", quantity=_SIGNED, rank=1),
            Column(key="before_s", header="before", rank=2),
            Column(key="after_s", header="after", rank=2),
        ),
        rows=tuple(_trial_row(finding) for finding in findings.findings if finding.trial),
        caption="Before and after are median step times, both for the tokens of one step before, measured in turns. "
        "From and to are the 95 % interval of the measured saving. The error is predicted minus measured savings, as a "
        "share of the step before.",
    )


def _trial_row(finding: Finding) -> Row:
    trial = finding.trial
    assert trial is not None
    row: Row = {
        "kind": finding.kind,
        "change": " ".join(f"{name}={value}" for name, value in finding.fields.items()),
        "predicted": _predicted(finding),
    }
    if trial.after_s is None or trial.saved_s is None:
        return row | {"measured": trial.failure}
    # The error is relative to the step and not to the gain, because a predicted gain may be zero.
    error = None if finding.alone_s is None else (finding.alone_s - trial.saved_s) / trial.before_s
    after_s = trial.after_s / trial.tokens_ratio
    row |= {"least": trial.least_saved_s, "most": trial.most_saved_s}
    return row | {"measured": trial.saved_s, "error": error, "before_s": trial.before_s, "after_s": after_s}


def _changed_step(findings: Findings) -> Iterator[str]:
    """A warning where the unchanged step, measured again, differs from the one that the predictions are made from."""
    before = next((f.trial.before_s for f in findings.findings if f.trial), None)
    step_s = findings.step_s
    if before is not None and step_s and abs(before / step_s - 1) > _SAME_STEP:
        yield (
            f"The step as it was took {units.format_time(before)} now and {units.format_time(step_s)} in the record "
            f"({100 * (before / step_s - 1):+.0f} %), so the machine has changed: the predictions are made from the "
            "record, the measurements on the machine as it is now."
        )
