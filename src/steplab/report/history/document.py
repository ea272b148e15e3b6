"""The document of a history: the changes of level, a picture, and a row for each commit."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.history import ChangePoint, Point, Series
from steplab.records.run_figures import RUN_FIGURES, Unit
from steplab.report.history.chart import history_chart
from steplab.report.kit.document import Column, Document, Row, Section, Table, Verdict, later, named_section
from steplab.report.kit.quantities import DIGITS, LABEL, TEXT, TIMES
from steplab.report.run.columns import QUANTITIES

_NAMED = 3


def history_document(histories: Sequence[Series]) -> Document:
    """All that is said of the histories of one figure."""
    (metric,) = {series.metric for series in histories}
    return Document(
        title=f"History of {_name(metric)}",
        verdict=Verdict(sentences=tuple(_answers(histories))),
        sections=tuple(_section(series) for series in histories),
        data=Table(name="history", columns=(), rows=tuple(row for series in histories for row in _rows(series))),
    )


def _answers(histories: Sequence[Series]) -> Iterator[str]:
    changed = [(series, change) for series in histories for change in series.changes]
    if not changed:
        longest = max(len(series.points) for series in histories)
        where = f"the longest of {len(histories)} histories has" if len(histories) > 1 else "the history has"
        points = f"{units.counted(longest, 'point')} (a commit, or a run without one)"
        yield f"No change of level was found: {where} {points}, and it takes about ten to find a change."
    newest = sorted(changed, key=lambda pair: pair[0].points[pair[1].index].created_utc, reverse=True)
    for series, change in newest[:_NAMED]:
        yield f"{series.label}: {change_words(series, change)}."


def change_words(series: Series, change: ChangePoint) -> str:
    """20.0 ms to 22.1 ms, 1.105×, from commit 1a2b3c4 of 2026-11-21 on (p 0.003)."""
    point, quantity = series.points[change.index], QUANTITIES[_unit(series.metric)]
    since = f"commit {point.commit}" if point.commit else f"run {point.ids[0]}"
    return (
        f"{quantity.show(change.before)} to {quantity.show(change.after)}, {change.ratio:.3f}×, from {since} of "
        f"{point.created_utc[:10]} on (p {change.p:.2g})"
    )


def _section(series: Series) -> Section:
    quantity = QUANTITIES[_unit(series.metric)]
    table = Table(
        name=series.label,
        columns=(
            Column(key="created_utc", header="UTC", quantity=TEXT),
            Column(key="commit", header="commit", quantity=TEXT),
            Column(key="runs", header="runs", quantity=LABEL),
            Column(key="value", header=_name(series.metric), quantity=quantity),
            Column(
                key="change",
                header="change of level",
                quantity=TIMES,
                note="A change is the ratio of the medians of two levels.",
            ),
            Column(key="p", header="p", quantity=DIGITS),
        ),
        rows=tuple(_rows(series))[::-1],
        caption="The newest commit first; medians of its runs.",
    )
    return named_section(series.label, later(history_chart, series, quantity), table)


def _rows(series: Series) -> Iterator[Row]:
    changes = {change.index: change for change in series.changes}
    for index, point in enumerate(series.points):
        yield _row(series, point, changes.get(index))


def _row(series: Series, point: Point, change: ChangePoint | None) -> Row:
    return {
        "series": series.label,
        "metric": series.metric,
        "created_utc": point.created_utc,
        "commit": point.commit,
        "runs": len(point.ids),
        "value": point.value,
        "change": change.ratio if change else None,
        "p": change.p if change else None,
    }


def _name(metric: str) -> str:
    return metric.replace("_per_s", "/s").removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def _unit(metric: str) -> Unit:
    return next(figure.unit for figure in RUN_FIGURES if figure.key == metric)
