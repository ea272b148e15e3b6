"""The charts of a page: functions from cells to a Chart, a few small SVGs and their legend.

Hover texts give exact figures. Failures are drawn too, because an empty place would read as 'not measured'.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from steplab import stats, units
from steplab.records.disturbances import disturbance_words
from steplab.report.kit import axes as ax
from steplab.report.kit import charts as kit
from steplab.report.kit.axes import Layout
from steplab.report.kit.charts import (
    GLYPHS,
    INK,
    MUTED,
    PAPER,
    Drawing,
    put_line,
    put_mark,
    series_color,
    series_legend,
)
from steplab.report.kit.document import Chart, Legend
from steplab.report.run.cells import Panel, RunCell, arrange, label, varying
from steplab.report.run.one_run import interval_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_PANELS = 6
_LABEL_PX = 48  # room of a figure next to a mark
_CAPACITY_MATTERS = 0.3  # show the device's memory once a peak reaches this share of it


def step_times(cells: Sequence[RunCell]) -> Chart | None:
    cells = [c for c in cells if c.run.samples_s or c.run.failure]
    summaries = {c.run.id: stats.summarize(samples) for c in cells if (samples := c.run.samples_s)}
    if not summaries or len(cells) < 2:
        return None  # the summary says it of a single run
    (layout, panels), fields = arrange(cells), varying(cells)
    scale = kit.time_scale([v for s in summaries.values() for v in (s.low, s.high)])

    def paint(picture: Drawing, axes: "Axes", layout: Layout, panel: Panel, place: ax.Places) -> None:
        lines: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for position, series, cell in panel.marks:
            x, summary = place.x(position, series), summaries.get(cell.run.id)
            if summary is None:
                _failed(picture, axes, x, cell, fields, top=True)
                continue
            group = (series, layout.positions[position][0] if layout.inner else "")
            lines.setdefault(group, []).append((x, summary.median))
            color, show = series_color(series), units.format_time
            axes.plot([x, x], [summary.low, summary.high], color=color, linewidth=2)
            warnings = disturbance_words(cell.run)
            hollow: dict[str, Any] = {"markerfacecolor": PAPER, "markeredgewidth": 1.5} if warnings else {}
            mark = put_mark(axes, x, summary.median, series, linestyle="none", **hollow)
            told = f"{label(cell, fields)}: {show(summary.median)}, {interval_words(summary)}"
            picture.tip(mark, told + (f"; warning: {warnings}" if warnings else ""))
            if place.mark_px >= _LABEL_PX:
                axes.annotate(show(summary.median), (x, summary.high), (0, 7), textcoords="offset points",
                              ha="center", va="bottom", fontsize=11, color=INK)  # fmt: skip
        if layout.ordered:
            for (series, _), points in lines.items():
                put_line(axes, points, series)

    note = (
        "Median step time; whiskers are the 95 % interval of the median, or the range of fewer than six steps, often "
    )
    note += f"narrower than the mark. The scale {'is logarithmic' if scale.log else 'starts at zero'}."
    if any(disturbance_words(cell.run) for cell in cells):
        note += " Hollow marks are runs with a warning."
    return _chart(layout, panels, "step time", scale, paint, note=note, legend=_legend(layout, GLYPHS))


def peak_memory(cells: Sequence[RunCell]) -> Chart | None:
    cells = [c for c in cells if c.run.memory or c.run.timing or c.run.failure]
    if len(cells) < 2:
        return None
    peaks = {c.run.id: p for c in cells if (p := c.run.peak)}
    if not peaks:
        return _host_memory(cells)
    (layout, panels), fields = arrange(cells), varying(cells)
    totals = {c.run.memory.total_bytes for c in cells if c.run.memory} - {None}
    highest = max(peak.peak_reserved_bytes for peak in peaks.values())
    total = totals.pop() if len(totals) == 1 else None
    near = total is not None and (highest >= _CAPACITY_MATTERS * total or any(c.run.failure for c in cells))
    scale = kit.bytes_scale([highest], total if near else None)

    def paint(picture: Drawing, axes: "Axes", layout: Layout, panel: Panel, place: ax.Places) -> None:
        if near and total is not None:
            axes.axhline(total, color=MUTED, linewidth=1, linestyle=kit.DASHED)
            axes.text(1, total, f"device memory, {units.format_bytes(total)}", ha="right", va="bottom",
                      transform=axes.get_yaxis_transform(), fontsize=10, color=MUTED)  # fmt: skip
        for position, series, cell in panel.marks:
            x, peak, color = place.x(position, series), peaks.get(cell.run.id), series_color(series)
            if peak is None:
                _failed(picture, axes, x, cell, fields)
                continue
            width = 0.86 * place.step
            axes.bar(x, peak.peak_reserved_bytes, width, color=color, alpha=0.3)
            (bar,) = axes.bar(x, peak.peak_allocated_bytes, width, color=color)
            sizes = map(units.format_bytes, (peak.peak_allocated_bytes, peak.peak_reserved_bytes))
            picture.tip(bar, "{}: {} allocated, {} reserved".format(label(cell, fields), *sizes))

    note = "Peak memory of a step. Solid: bytes in live tensors. Pale: bytes held by the allocator. "
    note += "OOM: the cell ran out of memory." if any(c.run.failure for c in cells) else ""
    return _chart(layout, panels, "peak memory", scale, paint, note=note, legend=_legend(layout))


def _host_memory(cells: Sequence[RunCell]) -> Chart | None:
    sizes = {c.run.id: s for c in cells if c.run.memory and (s := c.run.memory.host_peak_bytes)}
    if not sizes:
        return None
    (layout, panels), fields = arrange(cells), varying(cells)
    scale = kit.bytes_scale(sizes.values(), None)

    def paint(picture: Drawing, axes: "Axes", layout: Layout, panel: Panel, place: ax.Places) -> None:
        for position, series, cell in panel.marks:
            x, size = place.x(position, series), sizes.get(cell.run.id)
            if size is None:
                _failed(picture, axes, x, cell, fields)
                continue
            (bar,) = axes.bar(x, size, 0.86 * place.step, color=series_color(series))
            picture.tip(bar, f"{label(cell, fields)}: {units.format_bytes(size)}")

    note = "Largest resident set of the measuring process, Python and libraries included: this device's "
    note += "allocator does not count live tensors."
    return _chart(layout, panels, "peak memory of the process", scale, paint, note=note, legend=_legend(layout))


def _chart(
    layout: Layout,
    panels: Sequence[Panel],
    name: str,
    scale: kit.Scale,
    paint: Callable[[Drawing, "Axes", Layout, Panel, ax.Places], None],
    *,
    note: str,
    legend: Legend,
) -> Chart:
    ranked = sorted(range(len(panels)), key=lambda index: -len(panels[index].marks))
    pictures = []
    for panel in (panels[index] for index in sorted(ranked[:_MOST_PANELS])):
        used = sorted({position for position, _, _ in panel.marks})
        own = replace(layout, positions=tuple(layout.positions[position] for position in used))
        moved = replace(panel, marks=tuple((used.index(at), series, cell) for at, series, cell in panel.marks))
        title = f"{name}, {panel.title}" if panel.title else name
        with ax.panel(own, scale, title, ax.chart_width(own)) as (picture, axes, place):
            paint(picture, axes, own, moved, place)
            pictures.append(picture.picture(panel.title))
    if left_out := sum(len(panels[index].marks) for index in ranked[_MOST_PANELS:]):
        note += f" {units.counted(left_out, 'more run')} in panels with fewer runs: the table of runs has them."
    return Chart(pictures=tuple(pictures), legend=legend, note=note)


def _legend(layout: Layout, glyphs: Sequence[str] = ("■",)) -> Legend:
    return series_legend(layout.series, glyphs) if len(layout.series) > 1 else ()


def _failed(
    picture: Drawing, axes: "Axes", x: float, cell: RunCell, fields: Sequence[str], *, top: bool = False
) -> None:
    if cell.run.failure:  # else it was measured, but not this figure: the page says why
        kit.mark_failure(picture, axes, x, cell.run.failure, label(cell, fields), top=top)
