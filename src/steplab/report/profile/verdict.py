"""States a profile's verdict: predicted savings, or else where time goes."""

from collections.abc import Iterator

from steplab import units
from steplab.records.finding import Evidence, Finding, Findings
from steplab.records.rows import Row
from steplab.records.run import Run
from steplab.report.kit.document import Column, Document, Fact, Pairs, Section, Sentences, Table, Verdict, row_of
from steplab.report.kit.quantities import PERCENT, TIME, Quantity, in_unit
from steplab.report.profile.words import largest_categories, time_sentence
from steplab.report.run.one_run import run_title
from steplab.report.run.verdict import run_cautions
from steplab.specs.step_fields import option_name

_MOST_TOLD = 3
_NOTE = "Savings per step, predicted one by one; they overlap and do not add up. `steplab explain {}` has the evidence."
_LEAST = 0.01


def finding_sentences(run: Run, findings: Findings | None) -> Iterator[str]:
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
    least_s = _LEAST * (findings.step_s or 0.0)
    worth = [finding for finding in findings.findings if finding.gain_s is None or finding.gain_s >= least_s]
    if not worth:
        yield f"No change saves {units.format_limit(_LEAST)} of the step."
        return
    first, *others = worth[:_MOST_TOLD]
    yield saving_sentence(first, findings.step_s)
    if others:
        yield f"Also (savings may overlap): {'; '.join(f'{other.title} ({_also(other, first)})' for other in others)}."


def _also(finding: Finding, first: Finding) -> str:
    of_it = " of that" if finding.kind == first.includes and finding.gain_s is not None else ""
    return f"{saved_words(finding)}{of_it}{', after that change' if finding.after == first.kind else ''}"


def saving_sentence(finding: Finding, step_s: float | None) -> str:
    if finding.saves_s is None:
        return f"{finding.title}: its saving cannot be predicted from this record."
    change = _options(finding) or "changing that"
    behind = f", after the change for {finding.after}" if finding.after else ""
    return f"{finding.title}: {change} saves {saving_words(finding, step_s)}{behind}."


def _options(finding: Finding) -> str:
    return " ".join(f"{option_name(name)} {value}" for name, value in finding.fields.items())


def saving_words(finding: Finding, step_s: float | None) -> str:
    """Example: 'about 3.00 ms of 30.0 ms per step, 10.0 %'; a larger batch saves 'for the same tokens'."""
    saved, gain_s = saved_words(finding), finding.gain_s
    if step_s is None or gain_s is None:
        return f"{saved} per step" if finding.tokens_ratio == 1 else saved
    step, share = units.format_time(step_s), units.format_percent(gain_s / step_s)
    return f"{saved} of {step} per step, {share}" if finding.tokens_ratio == 1 else f"{saved}, {share} of {step}"


def saved_words(finding: Finding) -> str:
    """Example: 'about 12.3 ms', 'at most 4.56 ms', 'a measured 3.21 ms'."""
    gain_s, trial = finding.gain_s, finding.trial
    if gain_s is None:
        return f"{units.format_time(finding.alone_s)} alone" if finding.alone_s is not None else "not predicted"
    tokens = "" if finding.tokens_ratio == 1 else " for the same tokens"
    how = "a measured" if trial and trial.saved_s is not None else "at most" if finding.at_most else "about"
    return f"{how} {units.format_time(gain_s)}{tokens}"


def saving_facts(findings: Findings) -> list[Fact]:
    if not findings.step_s or not findings.findings or (saves_s := findings.findings[0].saves_s) is None:
        return []
    text = f"largest predicted saving: {_options(findings.findings[0]) or findings.findings[0].title}"
    return [Fact(figure=units.format_percent(saves_s / findings.step_s), text=text)]


def findings_section(findings: Findings) -> Section:
    def share(finding: Finding) -> float | None:
        return finding.saves_s / findings.step_s if finding.saves_s and findings.step_s else None

    table = Table.of(
        "findings",
        findings.findings,
        (
            Column(key="title", header="finding", wraps_from=30),
            Column(key="saves", value=saved_words),
            Column(key="share", header="of the step", quantity=PERCENT, value=share, bar=True),
            Column(key="change", wraps_from=24, rank=1),
        ),
        caption=_NOTE.format(findings.run_id),
    )
    return Section.of("Possible savings", table)


_SAME_STEP = 0.20
"""Relative difference between measurements of one step above which the machine must have changed between them.

Medians usually repeat within a few per cent.
"""
_CAPTION = "Savings are predicted one by one and may overlap. Each is capped by the time that those above leave{}."
_TO_TRY = "`--try` measures the changes that are options of `steplab run`."
_SIGNED = Quantity(units.format_change)


def findings_document(run: Run, findings: Findings) -> Document:
    found = findings.findings
    caption = _CAPTION.format(", not counting a larger batch" if any(f.tokens_ratio != 1 for f in found) else "")
    caption += f" {_TO_TRY}" if any(finding.fields for finding in found) else ""
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
            return f"It saves {saved_words(finding)}, but overlaps with those above."
        return "This record does not allow a prediction of the saving."
    return f"The change saves {saving_words(finding, step_s)}."


def _figure(evidence: Evidence) -> str:
    value = evidence.value
    if evidence.unit:
        return in_unit(value, evidence.unit)
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
    return Table(
        name="trials",
        columns=(
            Column(key="kind", header="finding"),
            Column(key="change"),
            Column(key="predicted", quantity=TIME),
            Column(key="measured", quantity=TIME),
            Column(key="least", header="measured, low", quantity=TIME, rank=3),
            Column(key="most", header="measured, high", quantity=TIME, rank=3),
            Column(key="error", quantity=_SIGNED, rank=1),
            Column(key="before_s", header="before", rank=2),
            Column(key="after_s", header="after", rank=2),
        ),
        rows=tuple(_trial_row(finding) for finding in findings.findings if finding.trial),
        caption="before, after: median times without and with the change, alternating, for the same number of tokens. "
        "low, high: 95 % interval of the measured saving. error: predicted minus measured saving, relative to before.",
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
    before = next((f.trial.before_s for f in findings.findings if f.trial), None)
    step_s = findings.step_s
    if before is not None and step_s and abs(before / step_s - 1) > _SAME_STEP:
        yield (
            f"The unchanged step took {units.format_time(before)} now and {units.format_time(step_s)} in the record "
            f"({100 * (before / step_s - 1):+.0f} %), so the machine has changed: predictions follow the record, "
            "measurements the machine's present state."
        )
