"""Findings on a terminal, as Markdown, as JSON, and as data for a page."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.codec import encode
from steplab.records.finding import Evidence, Finding, Findings
from steplab.records.run import Run
from steplab.report.blocks import grid_table, section
from steplab.report.fitting import fit
from steplab.report.formats import escape_markdown
from steplab.report.grid import Grid
from steplab.report.kit.terminal import draw, terminal_width
from steplab.report.kit.text import ABSENT, plain
from steplab.report.run.words import run_title

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMATS = ("table", "json", "md")
"""What findings can be written as."""

TRIAL_HEADERS = ("finding", "change", "predicted", "measured", "error", "step")
_SAME_STEP = 0.20
"""Least difference of the step measured anew from the recorded one that a change of machine, clocks or load explains
better than chance: repeated medians of one step differ by a few per cent."""
_WIDEST = 100  # longer lines are hard to read, however wide the terminal


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingParts:
    """One finding as texts, ready to be set in any medium."""

    kind: str
    title: str
    gain: str
    """'saves about 12.3 ms of 49.1 ms a step (25.1 %)', or 'at most'."""
    saw: str
    why: str
    change: str
    """A command or a line of code."""
    note: str
    prediction: str
    evidence: tuple[tuple[str, str], ...]
    """Name and figure with its unit."""
    trial: str
    """What the trial gave; '' without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingsSection:
    """All that a page shows of them."""

    findings: tuple[FindingParts, ...]
    trials: tuple[tuple[str, ...], ...]
    """A row a trial, a text for each of TRIAL_HEADERS; empty where nothing was tried."""
    trials_note: str
    """What to doubt of the trials; '' for nothing."""
    not_looked_at: tuple[str, ...]
    caption: str


def findings_section(findings: Findings) -> FindingsSection:
    """The findings as texts, for a page or for any other renderer."""
    return FindingsSection(
        findings=tuple(_parts(finding, findings.step_s) for finding in findings.findings),
        trials=tuple(_trial_row(f) for f in findings.findings if f.trial),
        trials_note=_trials_note(findings),
        not_looked_at=findings.not_looked_at,
        caption=_CAPTION,
    )


_CAPTION = (
    "Each gain is predicted as if the other changes were not made: they do not add up. `--try` measures those that are "
    "a field of the step."
)
_NOTHING = "Nothing found that is worth a change."


def render_findings(run: Run, findings: Findings, format: str, *, width: int | None = None, color: bool = False) -> str:
    """The findings in one of FORMATS, without a newline at the end; width and color are for the terminal alone."""
    if format == "json":
        return encode(findings).decode()
    shown = findings_section(findings)
    if format == "md":
        return "\n".join(_markdown(run, findings, shown))
    width = width or terminal_width()
    return draw(*_terminal(run, findings, shown, min(width, _WIDEST)), width=width, color=color)


def _parts(finding: Finding, step_s: float | None) -> FindingParts:
    return FindingParts(
        kind=finding.kind,
        title=finding.title,
        gain=_gain(finding, step_s),
        saw=finding.saw,
        why=finding.why,
        change=finding.change,
        note=finding.note,
        prediction=finding.prediction,
        evidence=tuple((e.what, _figure(e)) for e in finding.evidence),
        trial=_trial_words(finding),
    )


def _gain(finding: Finding, step_s: float | None) -> str:
    if finding.saves_s is None:
        return "what it saves cannot be said from this record"
    about = "at most" if finding.at_most else "about"
    if step_s is None:
        return f"saves {about} {units.format_time(finding.saves_s)} a step"
    share = units.format_percent(finding.saves_s / step_s)
    return f"saves {about} {units.format_time(finding.saves_s)} of {units.format_time(step_s)} a step ({share})"


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


def _trial_words(finding: Finding) -> str:
    trial = finding.trial
    if trial is None:
        return ""
    if trial.after_s is None or trial.saved_s is None:
        return f"tried: no result, {trial.failure}"
    per = "" if trial.tokens_ratio == 1 else f" for {trial.tokens_ratio:g} times the tokens"
    return (
        f"tried: {units.format_time(trial.before_s)} became {units.format_time(trial.after_s)}{per}, "
        f"saving {units.format_time(trial.saved_s)}"
        + (f" where {_predicted(finding)} were predicted" if finding.saves_s is not None else "")
    )


def _trials_note(findings: Findings) -> str:
    """That the step, measured anew without any change, was another than the one the predictions are made from."""
    before = next((f.trial.before_s for f in findings.findings if f.trial), None)
    step_s = findings.step_s
    if before is None or not step_s or abs(before / step_s - 1) <= _SAME_STEP:
        return ""
    return (
        f"The step as it was took {units.format_time(before)} now and {units.format_time(step_s)} in the record "
        f"({100 * (before / step_s - 1):+.0f} %), so the machine is not as it was: the predictions are of the record, "
        "the measurements of today."
    )


def _predicted(finding: Finding) -> str:
    if finding.saves_s is None:
        return ABSENT
    return f"{'at most ' if finding.at_most else ''}{units.format_time(finding.saves_s)}"


def _trial_row(finding: Finding) -> tuple[str, ...]:
    trial = finding.trial
    assert trial is not None
    change = " ".join(f"{name}={value}" for name, value in finding.fields.items())
    predicted = _predicted(finding)
    if trial.after_s is None or trial.saved_s is None:
        return (finding.kind, change, predicted, trial.failure or ABSENT, ABSENT, ABSENT)
    error = ABSENT
    if finding.saves_s is not None:
        # Of the step, and not of the gain: a gain of nothing may be predicted, and would be missed by infinity.
        share = (finding.saves_s - trial.saved_s) / trial.before_s
        error = f"{100 * share:+.1f} % of the step"
    after = units.format_time(trial.after_s / trial.tokens_ratio)
    step = f"{units.format_time(trial.before_s)} → {after}"
    return (finding.kind, change, predicted, units.format_time(trial.saved_s), error, step)


# --- terminal ---------------------------------------------------------------------------------------------


def _terminal(run: Run, findings: Findings, shown: FindingsSection, width: int) -> "Iterator[RenderableType]":
    from rich.text import Text

    yield Text(plain(run_title(run)), style="bold")
    yield Text(plain(f"run {run.id} · {run.created_utc}"), style="dim")
    if not shown.findings:
        yield from _wrapped(_NOTHING, width, before="\n")
    for number, parts in enumerate(shown.findings, start=1):
        yield Text()
        yield Text.assemble((f"{number}. {plain(parts.title)}", "bold"), (f"  {parts.kind}", "dim"))
        yield from _wrapped(parts.gain, width, style="green")
        for text in (parts.saw, parts.why, f"Prediction: {parts.prediction}"):
            yield from _wrapped(text, width)
        # Not wrapped: to be copied as it stands.
        yield Text(f"   $ {plain(parts.change)}" if _is_command(parts.change) else f"   {plain(parts.change)}", "cyan")
        if parts.note:
            yield from _wrapped(f"({parts.note})", width, style="dim")
        if parts.trial:
            yield from _wrapped(parts.trial, width, style="bold")
    if shown.trials:
        numeric = (False, False, True, True, True, True)
        table = fit(Grid(headers=TRIAL_HEADERS, rows=shown.trials, numeric=numeric), width - 2, "step", "error")
        yield from section("Predicted against measured, saved a step", grid_table(table, width - 2))
        if table.caption:
            yield from _wrapped(table.caption, width, style="dim", indent="  ")
        if shown.trials_note:
            yield from _wrapped(shown.trials_note, width, indent="  ")
    if shown.findings:
        yield Text()
        yield from _wrapped(shown.caption, width, style="dim", indent="")
    if shown.not_looked_at:
        yield from section("Not looked at", *(Text(f"- {plain(gap)}") for gap in shown.not_looked_at))


def _wrapped(
    text: str, width: int, *, style: str = "", before: str = "", indent: str = "   "
) -> "Iterator[RenderableType]":
    from rich.text import Text

    lines = textwrap.fill(plain(text), width=max(width, 20), initial_indent=indent, subsequent_indent=indent)
    yield Text(before + lines, style=style)


def _is_command(change: str) -> bool:
    return change.startswith("steplab ")


# --- Markdown ---------------------------------------------------------------------------------------------


def _markdown(run: Run, findings: Findings, shown: FindingsSection) -> Iterator[str]:
    yield f"# {_md(run_title(run))}"
    yield f"\nrun {run.id} · {run.created_utc} · explained by steplab {findings.steplab_version}"
    if not shown.findings:
        yield f"\n{_NOTHING}"
    for number, parts in enumerate(shown.findings, start=1):
        yield f"\n## {number}. {_md(parts.title)}\n"
        yield f"**{_md(parts.gain)}** ({_md(parts.kind)})\n"
        yield f"{_md(parts.saw)}\n"
        yield f"{_md(parts.why)}\n"
        yield f"```{'sh' if _is_command(parts.change) else 'python'}\n{plain(parts.change)}\n```\n"
        yield from (f"{_md(parts.note)}\n",) if parts.note else ()
        yield f"*Prediction:* {_md(parts.prediction)}\n"
        yield "| seen | |\n| --- | ---: |"
        yield from (f"| {_md(what)} | {_md(figure)} |" for what, figure in parts.evidence)
        yield from (f"\n**{_md(parts.trial)}**",) if parts.trial else ()
    if shown.trials:
        yield "\n## Predicted against measured, saved a step\n"
        yield f"| {' | '.join(TRIAL_HEADERS)} |\n| --- | --- | ---: | ---: | ---: | ---: |"
        yield from (f"| {' | '.join(map(_md, row))} |" for row in shown.trials)
        yield from (f"\n{_md(shown.trials_note)}",) if shown.trials_note else ()
    yield from (f"\n{shown.caption}",) if shown.findings else ()
    if shown.not_looked_at:
        yield "\n## Not looked at\n"
        yield from (f"- {_md(gap)}" for gap in shown.not_looked_at)


def _md(text: str) -> str:
    """Text from a record, which may name kernels and files: nothing in it is taken for Markdown or for a terminal."""
    return escape_markdown(plain(text))
