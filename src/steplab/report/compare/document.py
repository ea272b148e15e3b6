from collections.abc import Iterable
from dataclasses import replace

from steplab import units
from steplab.records.comparison import ComparedFigure, Comparison, Side
from steplab.report.compare.words import interval_words, kernel_words, memory_words, unlike_words, verdict
from steplab.report.kit.document import Bar, Bars, Column, Document, Pairs, Row, Section, Segment, Table, row_of
from steplab.report.kit.labels import short_name
from steplab.report.kit.quantities import LABEL, in_unit
from steplab.report.run.columns import CONVENTIONS
from steplab.report.turns.document import RATIO_IN_TURNS

_GROUPS = {
    "time": "Times",
    "phase": "Phases of a step",
    "speed": "Rates",
    "memory": "Memory",
    "category": "Memory at the peak by category",
    "kernels": "Kernels by category, per profiled step",
    "communication": "Communication",
}
_WORSE, _BETTER, _OPEN = 2, 1, 7
_MOST_BARS = 24


def compare_document(comparison: Comparison) -> Document:
    in_order = sorted(comparison.figures, key=lambda figure: not figure.decides)
    rated = {figure.group for figure in comparison.figures if figure.ratio}
    with_interval = next((group for group in _GROUPS if group in rated), None)
    figures = [_group(comparison, group, title, explained=group == with_interval) for group, title in _GROUPS.items()]
    return Document(
        title=f"{_title(comparison.b)} (B) against {_title(comparison.a)} (A)",
        verdict=verdict(comparison),
        sections=(
            _picture(comparison.figures),
            *figures,
            Section.notes([f"{kernel_words(change)}." for change in comparison.kernels], "Where device time changed"),
            Section.notes([f"{memory_words(change)}." for change in comparison.memory], "Where memory changed"),
            Section.of("Compared records", Pairs(pairs=tuple(_sides(comparison)))),
            Section.notes(comparison.notes, "Not compared"),
        ),
        data=[_row(comparison, figure) for figure in in_order],
    )


def _group(comparison: Comparison, group: str, title: str, *, explained: bool) -> Section:
    found = [figure for figure in comparison.figures if figure.group == group]
    used = [(key.replace("_", " "), how) for key, how in CONVENTIONS.items()]
    told = "; ".join(f"{name}, {how}" for name, how in used if any(f"({name})" in figure.name for figure in found))
    caption = f"Medians.{f' {RATIO_IN_TURNS}' * comparison.in_turns}" if group == "time" else told and f"FLOPs: {told}."
    columns = _COLUMNS if explained else tuple(replace(column, note="") for column in _COLUMNS)
    return Section.of(title, Table.of(group, found, columns, caption))


def _change(figure: ComparedFigure) -> str:
    change = figure.b - figure.a
    if figure.unit == "share":
        return f"{100 * change:+.1f} points"
    return units.signed(change, lambda size: in_unit(size, figure.unit))


def _ratio(figure: ComparedFigure) -> str | None:
    return f"{figure.ratio.ratio if figure.ratio else figure.b / figure.a:.3f}×" if figure.a else None


def _p(figure: ComparedFigure) -> str | None:
    return f"{figure.ratio.p:.2g}" if figure.ratio and figure.ratio.p is not None else None


def _decision(figure: ComparedFigure) -> str | None:
    return figure.ratio.decision if figure.ratio else None


_COLUMNS = (
    Column(key="cell"),
    Column(key="name", header="figure"),
    Column(key="a", header="A", quantity=LABEL, value=lambda figure: in_unit(figure.a, figure.unit)),
    Column(key="b", header="B", quantity=LABEL, value=lambda figure: in_unit(figure.b, figure.unit)),
    Column(key="change", quantity=LABEL, value=_change),
    Column(key="ratio", quantity=LABEL, value=_ratio),
    Column(
        key="interval",
        header="95 % interval",
        value=lambda figure: interval_words(figure.ratio),
        note="The interval is of the ratio of medians, B / A: bootstrapped, wider if a run has a warning; memory has "
        "none. Phases, rates, compile time and reserved memory do not enter the verdict.",
    ),
    Column(
        key="p", quantity=LABEL, value=_p, note="p: Mann-Whitney test; higher and lower need both p and the interval."
    ),
    Column(key="decision", value=_decision, note="Higher, lower: interval beyond the threshold; same: within it."),
)


def _picture(figures: Iterable[ComparedFigure]) -> Section:
    rated = [(figure.b / figure.a - 1, figure) for figure in figures if figure.a > 0 and figure.a != figure.b]
    largest = sorted(rated, key=lambda p: (not p[1].decides, not _is_decided(p[1]), -abs(p[0])))[:_MOST_BARS]
    bars = tuple(_bar(change, figure) for change, figure in largest)
    legend = (
        (_WORSE, "■", "B is worse"),
        (_BETTER, "■", "B is better"),
        (_OPEN, "■", "same, undecided or single values"),
    )
    note = "Relative change of the medians from A to B: first the figures that decide, then the largest differences."
    return Section.of("Differences", Bars(bars=bars, legend=legend, note=note, first=12))


def _is_decided(figure: ComparedFigure) -> bool:
    return _decision(figure) in ("higher", "lower")


def _bar(change: float, figure: ComparedFigure) -> Bar:
    rises = (_BETTER, _WORSE) if figure.group == "speed" else (_WORSE, _BETTER)
    color = dict(zip(("higher", "lower"), rises, strict=True)).get(_decision(figure) or "", _OPEN)
    values = f"{in_unit(figure.a, figure.unit)} to {in_unit(figure.b, figure.unit)}"
    return Bar(
        label=": ".join(filter(None, (figure.cell, figure.name))),
        figure=units.signed(change, units.format_share),
        segments=(Segment(value=abs(change), color=color, tip=f"{figure.name}: {values}"),),
        detail=values,
        strong=figure.decides,
    )


def _sides(comparison: Comparison) -> Iterable[tuple[str, str]]:
    yield "A", _side(comparison.a)
    yield "B", _side(comparison.b)
    for found in comparison.allowed:
        yield "allowed to differ", unlike_words(found)


def _title(side: Side) -> str:
    if len(side.names) != 1 or side.names[0] == side.told:
        return side.told
    return f"'{short_name(side.names[0])}', {side.told}"


def _side(side: Side) -> str:
    ids = ", ".join(side.ids[:5]) + (f" and {len(side.ids) - 5} more" if len(side.ids) > 5 else "")
    if len(side.names) == 1:
        ids = f"'{short_name(side.names[0])}': {ids}"
    commits = f", measured at commit {', '.join(side.commits)}" if side.commits else ""
    return f"{units.counted(len(side.ids), 'record')} ({ids}){commits}"


def _row(comparison: Comparison, figure: ComparedFigure) -> Row:
    ratio = figure.ratio
    return {
        "outcome": comparison.outcome,
        "cell": figure.cell or None,
        "figure": figure.name,
        **row_of(figure, "group", "unit"),
        "decides": int(figure.decides),
        **row_of(figure, "a", "b"),
        "ratio": ratio.ratio if ratio else figure.b / figure.a if figure.a else None,
        **row_of(ratio, "low", "high", "p", "threshold", "decision"),
        "why": (ratio.why or None) if ratio else None,
        "more_samples": ratio.more if ratio else None,
        "samples_a": ratio.num_a if ratio else 1,
        "samples_b": ratio.num_b if ratio else 1,
    }
