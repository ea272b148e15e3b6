"""Plots measurements over a size: one panel per group, one line per series, a word for each failure.

Measurements without a common size become bars.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steplab import units
from steplab.records.failure import Failure
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import BAD, INK, MUTED, PAPER, Drawing, Scale, drawing, series_color, series_legend
from steplab.report.kit.document import Bar, Bars, Chart, Picture, Segment
from steplab.report.kit.text import why_failed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALONE, _BESIDE_OTHERS = 640.0, 440.0
_BELOW = 44.0
_LEAST_TICKS_PX = 44.0
_WORD_PX = 13.0
_MOST_PANELS = 6
_FIRST_BARS = 12
_FAILURES = {"out_of_memory": "OOM", "crashed": "crashed", "timeout": "timed out", "error": "error"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    x: float
    name: str
    y: float | None
    """None if unmeasured."""
    figure: str = ""
    detail: str = ""
    ends: tuple[float, float] | None = None
    """Low and high end of the error bar."""
    doubtful: bool = False
    """True: the marker is hollow, because the run has a warning."""
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Computed line, such as a fit."""

    name: str
    """Tooltip; if it is the name of a series, the curve has that colour."""
    points: Sequence[tuple[float, float]]
    style: Any = kit.DASHED


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    title: str
    lines: Mapping[str, Sequence[Point]]
    scale: Scale
    curves: Sequence[Curve] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    name: str
    note: str
    axis: str = ""
    show_x: Callable[[float], str] = "{:.0f}".format
    failures_on_top: bool = True
    """True for times and bytes, where more is worse: failures are marked at the top."""
    limit: float | None = None
    limit_name: str = ""


def line_chart(plot: Plot, panels: Sequence[Panel]) -> Chart:
    """Draw the panels, at most six: those with most points."""
    series = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    shown = sorted(panels, key=lambda panel: -_num_points(panel))[:_MOST_PANELS]
    width = _ALONE if len(shown) == 1 else _BESIDE_OTHERS
    pictures = tuple(_picture(plot, panel, series, width) for panel in panels if panel in shown)
    note = plot.note
    if left_out := sum(map(_num_points, panels)) - sum(map(_num_points, shown)):
        note += f" {units.counted(left_out, 'more point')} in panels with fewer points: the table has them."
    return Chart(pictures=pictures, legend=series_legend(series) if len(series) > 1 else (), note=note)


def point_bars(plot: Plot, points: Sequence[Point]) -> Bars:
    """Draw measurements that share no size as bars."""
    bars = []
    limit: dict[str, Any] = {"mark": plot.limit, "mark_tip": plot.limit_name}
    for point in points:
        if point.y is not None:
            segments = (Segment(value=point.y, color=1, tip=_tip(point)),)
            bars.append(Bar(label=point.name, figure=point.figure, segments=segments, detail=point.detail, **limit))
        elif point.failure:
            bars.append(Bar(label=point.name, figure=why_failed(point.failure), bad=True))
    return Bars(bars=tuple(bars), note=plot.note, first=_FIRST_BARS)


def _tip(point: Point) -> str:
    return f"{point.name}: {', '.join(filter(None, (point.figure, point.detail)))}"


def _num_points(panel: Panel) -> int:
    return sum(map(len, panel.lines.values()))


def _picture(plot: Plot, panel: Panel, series: Sequence[str], width: float) -> Picture:
    title = f"{plot.name}, {panel.title}" if panel.title else plot.name
    with drawing(width, kit.AXES_HEIGHT + _BELOW, title) as picture:
        axes = _frame(picture, plot, panel)
        if plot.limit is not None:
            line = axes.axhline(plot.limit, color=MUTED, linewidth=1, linestyle=kit.DASHED)
            picture.tip(line, plot.limit_name)
        for name, points in panel.lines.items():
            _line(picture, axes, points, series.index(name))
        for curve in panel.curves:
            color = series_color(series.index(curve.name)) if curve.name in series else INK
            look = {"color": color, "linewidth": 1.5, "linestyle": curve.style, "zorder": 1}
            (line,) = axes.plot(*zip(*curve.points, strict=True), **look)
            picture.tip(line, curve.name)
        _mark_failures(picture, axes, panel, on_top=plot.failures_on_top)
        return picture.picture(panel.title)


def _frame(picture: Drawing, plot: Plot, panel: Panel) -> "Axes":
    axes = picture.axes(kit.LEFT, _BELOW, kit.RIGHT, kit.TOP)
    places = sorted({point.x for points in panel.lines.values() for point in points})
    axes.set_xscale("log")
    margin = 1.25 if len(places) == 1 else (places[-1] / places[0]) ** 0.06
    axes.set_xlim(places[0] / margin, places[-1] * margin)
    panel.scale.put_on(axes)
    ticks = _apart(places, picture.width)
    axes.set_xticks(ticks, [plot.show_x(tick) for tick in ticks], fontsize=11)
    axes.grid()
    axes.set_xlabel(plot.axis, fontsize=11)
    return axes


def _apart(places: Sequence[float], width: float) -> list[float]:
    whole = math.log(places[-1] / places[0]) or 1.0
    kept = [places[0]]
    for place in places[1:]:
        if math.log(place / kept[-1]) / whole * (width - kit.LEFT - kit.RIGHT) >= _LEAST_TICKS_PX:
            kept.append(place)
    return kept


def _line(picture: Drawing, axes: "Axes", points: Sequence[Point], index: int) -> None:
    drawn: dict[float, float] = {}
    for point in sorted(points, key=lambda point: point.x):
        if point.y is None:
            continue
        if point.ends:
            axes.plot([point.x, point.x], point.ends, color=series_color(index), linewidth=2)
        hollow: dict[str, Any] = {"markerfacecolor": PAPER, "markeredgewidth": 1.5} if point.doubtful else {}
        picture.tip(kit.put_mark(axes, point.x, point.y, index, **hollow), _tip(point))
        drawn[point.x] = point.y
    kit.put_line(axes, list(drawn.items()), index)


def _mark_failures(picture: Drawing, axes: "Axes", panel: Panel, *, on_top: bool) -> None:
    failed: dict[float, int] = {}
    for point in (point for points in panel.lines.values() for point in points):
        if point.y is None and point.failure:
            offset = failed.get(point.x, 0) * _WORD_PX
            failed[point.x] = failed.get(point.x, 0) + 1
            word = axes.annotate(
                _FAILURES.get(point.failure.kind, "failed"), (point.x, 0.985 if on_top else 0.015), (offset, 0),
                xycoords=axes.get_xaxis_transform(), textcoords="offset points", rotation=90, fontsize=10,
                ha="center", va="top" if on_top else "bottom", color=BAD,
            )  # fmt: skip
            picture.tip(word, f"{point.name}: {why_failed(point.failure)}")
