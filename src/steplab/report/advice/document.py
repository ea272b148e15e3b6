"""Reports a search for a faster step: its verdict, the tried changes, and how to apply the useful ones."""

import shlex
from collections.abc import Iterator
from itertools import zip_longest

from steplab import units
from steplab.records.advice import Advice, Tried
from steplab.records.comparison import Decision
from steplab.records.rows import Row
from steplab.report.kit.document import Block, Column, Section, Sentences, Table, Verdict, row_of
from steplab.report.kit.quantities import LABEL, PERCENT, TEXT, Quantity
from steplab.report.kit.text import made, why_failed
from steplab.report.report import RecordReport
from steplab.report.turns.document import alternating_caution, leaning_word, ratio_words
from steplab.specs.changes import OPT_IN
from steplab.specs.own_loop import own_loop, own_model
from steplab.specs.resolve import command
from steplab.specs.step import describe

_OF_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SIGNED_BYTES = Quantity(lambda size: units.signed(size, units.format_bytes))


def advice_title(advice: Advice) -> str:
    return describe(advice.spec) if advice.spec else "a step"


def advice_verdict(advice: Advice) -> Verdict:
    return Verdict(sentences=tuple(_answer(advice)), cautions=tuple(_cautions(advice)))


def _answer(advice: Advice) -> Iterator[str]:
    kept = ", ".join(tried.words for tried in advice.kept)
    if advice.failure or advice.best_s is None:
        why = why_failed(advice.failure) if advice.failure else "no step was measured"
        if not any(tried.ratio for tried in advice.tried):
            yield f"No step ran: {why}."
            return
        yield f"The fastest step failed, which ended the search: {why}."
        if kept and advice.overall:
            yield f"Until then, with {kept} the step took {_instead_of_the_first(advice)}."
    elif not advice.tried:
        yield f"No change was tried: the step as given takes {units.format_time(advice.best_s)}."
    elif not kept:
        yield f"None of the changes tried was shown to pay: the step as given takes {units.format_time(advice.best_s)}."
    elif advice.start_s is None:
        yield f"The step as given does not run; with {kept} it takes {units.format_time(advice.best_s)}."
    else:
        yield f"With {kept} the step takes {_instead_of_the_first(advice)}."
    missed = [(tried, _kept_with(tried, advice)) for tried in advice.tried if not tried.kept]
    if alone := [f"{tried.words} ({_decision(tried)})" for tried, others in missed if not others]:
        yield f"Tried and not kept: {', '.join(alone)}."
    for tried, others in missed:
        if others:
            yield f"{tried.words} by itself: {_result(tried)}; kept with {' and '.join(others)}."
    if advice.untried:
        why = "the search was interrupted" if advice.interrupted else "time was over"
        yield f"Not tried, because {why}: {', '.join(_untried(advice))}.{_more_time(advice)}"


def _instead_of_the_first(advice: Advice) -> str:
    best_s, start_s, overall = advice.best_s or 0.0, advice.start_s or 0.0, advice.overall
    ratio = f": {ratio_words(overall, start_s, best_s)}" if overall else ""
    return f"{units.format_time(best_s)} instead of {units.format_time(start_s)}{ratio}"


def tried_words(tried: Tried) -> str:
    result, ratio = _result(tried), tried.ratio
    if ratio and ratio.decision in ("lower", "higher"):
        share = abs(1 - ratio.ratio)
        verb = "saves" if tried.kept else "costs"
        result = f"{verb} {units.format_time(ratio.a * share)} ({units.format_percent(share)})"
    elif tried.kept and not tried.failure:
        result = "makes the step run"  # which did not before, so that there is nothing to compare
    return f"{tried.words}: {result}; {'kept' if tried.kept else 'dropped'}"


def _kept_with(tried: Tried, advice: Advice) -> list[str]:
    own = set(tried.all_words)
    found = (kept.all_words for kept in advice.kept if own < set(kept.all_words))
    return [words for words in next(found, ()) if words not in own]


def _untried(advice: Advice) -> Iterator[str]:
    for words, share, fits in zip_longest(advice.untried, advice.untried_shares, advice.untried_fits):
        gain_s = share * advice.best_s if share is not None and advice.best_s else None
        if fits is False:  # None: not recorded
            yield f"{words} (predicted not to fit the GPU's memory)"
        elif gain_s is None:
            yield words
        else:
            yield f"{words} ({f'predicted to save {units.format_time(gain_s)}' if gain_s > 0 else 'no gain predicted'})"


def _more_time(advice: Advice) -> str:
    if advice.untried_s is None or advice.interrupted:
        return ""
    return f" Trying them takes about {units.format_time(advice.untried_s)} more of --budget."


def _cautions(advice: Advice) -> Iterator[str]:
    yield from (f"Warning: {doubt}" for doubt in advice.doubts)
    for tried in advice.kept:
        if tried.numerics:
            instead = "leave out --opt-in" if set(tried.words.split()) & set(OPT_IN) else "--keep-precision"
            yield f"{tried.words} changes the numbers: {tried.numerics}. Without it: {instead}."
    if advice.alternating:
        yield alternating_caution(advice.alternating)


def _sections(advice: Advice) -> Iterator[Section]:
    yield Section.of("Changes in the order they were tried", _table(advice))
    if advice.best and advice.kept:
        device_kind = advice.environment.device.kind if advice.environment else "cuda"
        model = own_model(advice.best)
        yield Section.of(
            "The fastest step",
            Sentences.of([_allocator(advice) + command(advice.best)], "code"),
            "In a model of your own:" if model else None,
            Sentences.of(model, "code") if model else None,
            "In a training loop of your own:",
            Sentences.of(own_loop(advice.best, device_kind), "code"),
        )
    by_hand: list[Block | str] = []
    for found in advice.by_hand:
        by_hand += [f"{found.title}. {found.saw}", Sentences.of([found.change], "code")]
    yield Section.of("To be changed in the code", *by_hand)
    yield Section.notes(advice.notes)


def _allocator(advice: Advice) -> str:
    environment = advice.environment
    if environment is None or environment.device.kind != "cuda":
        return ""
    variables = environment.variables
    return "".join(f"{name}={shlex.quote(variables[name])} " for name in _OF_ALLOCATOR if name in variables)


def _table(advice: Advice) -> Table:
    on_host = advice.environment is not None and advice.environment.device.kind != "cuda"
    of_what = "process's" if on_host else "GPU's"
    least = units.format_limit(max((tried.ratio.threshold for tried in advice.tried if tried.ratio), default=0.0))
    return Table(
        name="changes",
        columns=(
            Column(key="change"),
            Column(key="predicted_s", header="predicted"),
            Column(key="saved_s", header="saved"),
            Column(key="least_saved_s", header="saved, low", rank=2),
            Column(key="most_saved_s", header="saved, high", rank=2),
            Column(key="after_s", header="step time", bar=True),
            Column(key="saved_share", header="saved, share", quantity=PERCENT, rank=3),
            Column(key="peak_bytes", header="peak memory", rank=1),
            Column(key="added_bytes", header="memory added", quantity=_SIGNED_BYTES, rank=4),
            Column(key="result", quantity=TEXT, wraps_from=12),
            Column(key="took_s", header="took", rank=6),
            Column(key="run_id", header="record", quantity=LABEL, rank=5),
        ),
        rows=tuple(_row(tried) for tried in advice.tried),
        caption="Steps alternated with and without the change, on top of the changes kept before. low, high: 95 % "
        f"interval of the saving; a change is kept if low is over {least} of the step and a rank test agrees. "
        f"Peak memory is the {of_what}. took: the trial, with building the step.",
        empty="no change was tried",
    )


def _row(tried: Tried) -> Row:
    ratio = tried.ratio
    added = None if tried.peak_bytes is None or tried.before_bytes is None else tried.peak_bytes - tried.before_bytes
    return {
        "change": tried.words,
        **row_of(tried, "field", "value"),
        "predicted_s": predicted_s(tried),
        "predicted_by": tried.predicted_by,
        "saved_s": ratio.a * (1 - ratio.ratio) if ratio else None,
        "least_saved_s": ratio.a * (1 - ratio.high) if ratio and ratio.high else None,
        "most_saved_s": ratio.a * (1 - ratio.low) if ratio and ratio.low else None,
        "before_s": ratio.a if ratio else None,
        "after_s": ratio.a * ratio.ratio if ratio else tried.step_s,
        "saved_share": 1 - ratio.ratio if ratio else None,
        "peak_bytes": tried.peak_bytes,
        "added_bytes": added,
        "kept": tried.kept,
        "result": _result(tried),
        "numerics": tried.numerics or None,
        **row_of(tried, "took_s", "run_id", "base_id"),
    }


def predicted_s(tried: Tried) -> float | None:
    if tried.predicted_share is None or tried.ratio is None:
        return None
    return tried.predicted_share * tried.ratio.a


def _result(tried: Tried) -> str:
    if tried.failure:
        return tried.failure
    decision = _decision(tried)
    if decision == "slower" and tried.waits_for_host and (tried.predicted_share or 0) > 0:
        return f"{decision} because the host launches it too late"
    if decision == "not decided" and tried.ratio and tried.ratio.why:
        return f"{decision}: {tried.ratio.why}"
    return decision


def _decision(tried: Tried) -> str:
    if tried.failure:
        return "failed"
    if not tried.kept and tried.ratio and (leaning := leaning_word(tried.ratio)):
        return "no gain" if leaning == "slower" else f"gain perhaps below {units.format_limit(tried.ratio.threshold)}"
    decision: Decision = "lower" if tried.kept else tried.ratio.decision if tried.ratio else "undecided"
    words: dict[Decision, str] = {"higher": "slower", "same": "no gain", "lower": "kept"}
    return words.get(decision, "not decided")


REPORT = RecordReport(
    chapter="Advice",
    anchor="advice",
    title=advice_title,
    subtitle=lambda advice: made(advice, "search"),
    called=lambda advice: advice.name or advice_title(advice),
    answer=advice_verdict,
    sections=_sections,
    rows=lambda advice: _table(advice).rows,
)
