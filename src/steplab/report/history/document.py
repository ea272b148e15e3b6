from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.comparison import ChangePoint, Series
from steplab.report.kit.charts import DOTTED, MUTED, SERIES, drawing
from steplab.report.kit.document import Chart, Column, Document, Row, Section, Table, Verdict, later
from steplab.report.kit.quantities import DIGITS, LABEL, TEXT, TIMES, Quantity, quantity_of

_NAMED = 3


def history_document(histories: Sequence[Series]) -> Document:
    (metric,) = {series.metric for series in histories}
    return Document(
        title=f"History of {_name(metric)}",
        verdict=Verdict(sentences=tuple(_answers(histories))),
        sections=tuple(_section(series) for series in histories),
        data=[row for series in histories for row in _rows(series)],
    )


def _answers(histories: Sequence[Series]) -> Iterator[str]:
    changed = [(series, change) for series in histories for change in series.changes]
    if not changed:
        longest = max(len(series.points) for series in histories)
        where = f"the longest of {len(histories)} histories has" if len(histories) > 1 else "the history has"
        points = f"{units.counted(longest, 'point')} (a point is a commit, or a run without a commit)"
        yield f"No change was found: {where} {points}, and about ten are needed."
    newest = sorted(changed, key=lambda pair: pair[0].points[pair[1].index].created_utc, reverse=True)
    for series, change in newest[:_NAMED]:
        yield f"{series.label}: {change_words(series, change)}."


def change_words(series: Series, change: ChangePoint) -> str:
    """Example: '20.0 ms to 22.1 ms, 1.105×, from commit 1a2b3c4 of 2026-11-21 on (p 0.003)'."""
    point, quantity = series.points[change.index], quantity_of(series.metric)
    since = f"commit {point.commit}" if point.commit else f"run {point.ids[0]}"
    return (
        f"{quantity.show(change.before)} to {quantity.show(change.after)}, {change.ratio:.3f}×, from {since} of "
        f"{point.created_utc[:10]} on (p {change.p:.2g})"
    )


def _section(series: Series) -> Section:
    quantity = quantity_of(series.metric)
    table = Table(
        name=series.label,
        columns=(
            Column(key="created_utc", header="newest run, UTC", quantity=TEXT),
            Column(key="commit", quantity=TEXT),
            Column(key="runs", quantity=LABEL),
            Column(key="value", header=_name(series.metric), quantity=quantity),
            Column(
                key="change",
                header="change of level",
                quantity=TIMES,
                note="A change is the ratio of the medians of two levels.",
            ),
            Column(key="p", quantity=DIGITS),
        ),
        rows=tuple(_rows(series))[::-1],
        caption="The newest commit first; medians of its runs.",
    )
    return Section.of(series.label, later(history_chart, series, quantity), table)


def _rows(series: Series) -> Iterator[Row]:
    changes = {change.index: change for change in series.changes}
    for index, point in enumerate(series.points):
        change = changes.get(index)
        yield {
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


_WIDTH, _HEIGHT = 720, 240


def history_chart(series: Series, quantity: Quantity) -> Chart | None:
    if len(series.points) < 2:
        return None
    values = [point.value for point in series.points]
    starts = [0, *(change.index for change in series.changes), len(values)]
    levels = [series.changes[0].before, *(change.after for change in series.changes)] if series.changes else []
    with drawing(_WIDTH, _HEIGHT, f"history, {series.label}") as picture:
        axes = picture.axes(72, 28, 12, 10)
        axes.set_xlim(-0.5, len(values) - 0.5)
        room = 0.1 * (max(values) - min(values)) or 0.05 * max(values)
        axes.set_ylim(min(values) - room, max(values) + room)
        ticks = axes.get_yticks()[1:-1]
        axes.set_yticks(ticks, [quantity.show(float(tick)) for tick in ticks])
        axes.grid(axis="y")
        axes.set_xticks([])
        axes.set_xlabel("commits, from the oldest to the newest")
        for first, last, level in zip(starts, starts[1:], levels, strict=False):
            axes.plot([first - 0.5, last - 0.5], [level, level], color=MUTED, linewidth=2)
        for change in series.changes:
            axes.axvline(change.index - 0.5, color=MUTED, linestyle=DOTTED)
        axes.plot(range(len(values)), values, color=SERIES[0], linewidth=1, alpha=0.4)
        for index, point in enumerate(series.points):
            (mark,) = axes.plot([index], [point.value], "o", color=SERIES[0], markersize=5)
            what = point.commit or point.ids[0]
            picture.tip(mark, f"{what}, {point.created_utc}: {quantity.show(point.value)}")
    note = "One mark per commit. Dotted strokes show where the level changes, thick lines the median of each level."
    return Chart(pictures=(picture.picture(),), note=note)
