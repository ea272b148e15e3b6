"""The picture of a history: a mark for each commit, lines for the levels."""

from steplab.records.history import Series
from steplab.report.kit.charts import MUTED, SERIES, drawing
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.quantities import Quantity

_WIDTH, _HEIGHT = 720, 240


def history_chart(series: Series, quantity: Quantity) -> Chart | None:
    """The figure by commit, with the median of each level and a stroke where a level begins."""
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
            axes.axvline(change.index - 0.5, color=MUTED, linestyle=(0, (2, 3)))
        axes.plot(range(len(values)), values, color=SERIES[0], linewidth=1, alpha=0.4)
        for index, point in enumerate(series.points):
            (mark,) = axes.plot([index], [point.value], "o", color=SERIES[0], markersize=5)
            what = point.commit or point.ids[0]
            picture.tip(mark, f"{what}, {point.created_utc}: {quantity.show(point.value)}")
        svg = picture.to_svg()
    note = "One mark per commit. Dotted strokes show where the level changes, thick lines the median of each level."
    return Chart(pictures=(Picture(title="", svg=svg, width=_WIDTH),), note=note)
