"""Charts of collectives over message sizes: a panel per backend and world size, a line per collective."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.comm import CommCell, CommFit
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import AXES_HEIGHT, Drawing, drawing, put_line, put_mark, series_color, series_legend
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.grouping import grouped
from steplab.report.kit.quantities import GB_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _BESIDE_OTHERS = 640.0, 440.0
_BELOW = 44.0
_CURVE_POINTS = 40
_LEAST_TICKS_PX = 44.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Panel:
    title: str
    lines: dict[str, list[CommCell]]
    fits: dict[str, CommFit]
    family: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plot:
    name: str
    y: Callable[[CommCell], float | None]
    series: tuple[str, ...]
    scales: dict[str, kit.Scale]


def time_over_size(cells: Sequence[CommCell], profile: Sequence[CommFit]) -> Chart | None:
    fits: dict[tuple[object, ...], CommFit] = {
        (fit.way, fit.dtype, fit.world_size, fit.collective): fit for fit in profile
    }
    groups = _groups(cells)
    panels = [
        _Panel(
            title=title,
            lines=_by_collective(group),
            fits={name: fits[(*key, name)] for name in _by_collective(group) if (*key, name) in fits},
            family=group[0].spec.transport,
        )
        for key, title, group in groups
    ]
    note = "Median time of the slowest rank. Both axes are logarithmic. "
    note += "Dashed lines are the fitted α + β · bytes. " if any(panel.fits for panel in panels) else ""
    return _chart(panels, "time of a call", note)


def bandwidth_over_size(cells: Sequence[CommCell]) -> Chart | None:
    groups = _groups(cells)
    panels = [_Panel(title=title, lines=_by_collective(group), fits={}) for _, title, group in groups]
    note = "Bus bandwidth by the median time of the slowest rank, in GB/s (1e9 bytes per second). Message sizes are on "
    note += "a logarithmic axis; the bandwidth starts at zero."
    if len({cell.spec.size_bytes for cell in cells}) < 2:
        return None
    return _chart(panels, "bus bandwidth", note, y=lambda cell: cell.bus_bandwidth)


def _median_s(cell: CommCell) -> float | None:
    return cell.slowest.median_s if cell.slowest else None


def _chart(
    panels: Sequence[_Panel], name: str, note: str, y: Callable[[CommCell], float | None] = _median_s
) -> Chart | None:
    times_of: dict[str, list[float]] = {}
    for panel in panels:
        times = [value for line in panel.lines.values() for cell in line if (value := y(cell)) is not None]
        if times:
            times_of.setdefault(panel.family, []).extend(times)
    panels = [panel for panel in panels if panel.family in times_of]
    if not panels:
        return None
    plot = _Plot(
        name=name,
        series=tuple(dict.fromkeys(series for panel in panels for series in panel.lines)),
        y=y,
        scales={
            family: kit.time_scale(values, log_from=1) if y is _median_s else _gigabytes(values)
            for family, values in times_of.items()
        },
    )
    width = _WIDTH if len(panels) == 1 else _BESIDE_OTHERS
    legend = series_legend(plot.series)
    return Chart(pictures=tuple(_picture(panel, plot, width) for panel in panels), legend=legend, note=note.strip())


def _picture(panel: _Panel, plot: _Plot, width: float) -> Picture:
    title = f"{plot.name}, {panel.title}" if panel.title else plot.name
    with drawing(width, AXES_HEIGHT + _BELOW, title) as picture:
        axes = _frame(picture, panel, plot)
        for series, cells in panel.lines.items():
            _paint(picture, axes, plot, series, cells)
            if series in panel.fits:
                _paint_fit(axes, plot, series, cells, panel.fits[series])
        return picture.picture(panel.title)


def _frame(picture: Drawing, panel: _Panel, plot: _Plot) -> "Axes":
    axes, scale = picture.axes(kit.LEFT, _BELOW, kit.RIGHT, kit.TOP), plot.scales[panel.family]
    places = sorted({cell.spec.size_bytes for cells in panel.lines.values() for cell in cells})
    axes.set_xscale("log")
    margin = 1.25 if len(places) == 1 else (places[-1] / places[0]) ** 0.06
    axes.set_xlim(places[0] / margin, places[-1] * margin)
    scale.put_on(axes)
    axes.set_xticks(
        _apart(places, picture.width), [units.format_message(x) for x in _apart(places, picture.width)], fontsize=11
    )
    axes.grid()
    axes.set_xlabel("message size", fontsize=11)
    return axes


def _gigabytes(values: Sequence[float]) -> kit.Scale:
    return replace(kit.percent_scale(values), show=lambda value: f"{value / 1e9:g}")


def _apart(places: Sequence[int], width: float) -> list[int]:
    whole = math.log(places[-1] / places[0]) or 1.0
    kept = [places[0]]
    for place in places[1:]:
        if math.log(place / kept[-1]) / whole * (width - kit.LEFT - kit.RIGHT) >= _LEAST_TICKS_PX:
            kept.append(place)
    return kept


def _paint(picture: Drawing, axes: "Axes", plot: _Plot, series: str, cells: Sequence[CommCell]) -> None:
    index = plot.series.index(series)
    points = []
    for cell in sorted(cells, key=lambda cell: cell.spec.size_bytes):
        y = plot.y(cell)
        if cell.slowest is None or y is None:
            if cell.failure:
                kit.mark_failure(picture, axes, cell.spec.size_bytes, cell.failure, cell.spec.label, top=True)
            continue
        x = cell.spec.size_bytes
        picture.tip(
            put_mark(axes, x, y, index),
            f"{cell.spec.label}: {units.format_time(cell.slowest.median_s)}, {GB_PER_S.show(cell.bus_bandwidth)} GB/s",
        )
        points.append((x, y))
    put_line(axes, points, index)


def _paint_fit(axes: "Axes", plot: _Plot, series: str, cells: Sequence[CommCell], fit: CommFit) -> None:
    timed = [cell for cell in cells if cell.slowest and cell.wire_bytes is not None]
    low, high = min(cell.spec.size_bytes for cell in timed), max(cell.spec.size_bytes for cell in timed)
    factor = timed[-1].wire_bytes / timed[-1].message_bytes if timed[-1].wire_bytes else 0.0
    xs = [low * (high / low) ** (step / _CURVE_POINTS) for step in range(_CURVE_POINTS + 1)]
    ys = [fit.alpha_s + fit.beta_s_per_byte * factor * x for x in xs]
    color = series_color(plot.series.index(series))
    axes.plot(xs, ys, color=color, linewidth=1.5, linestyle=kit.DASHED, zorder=1)


def _groups(cells: Sequence[CommCell]) -> list[tuple[tuple[str, str, int], str, list[CommCell]]]:
    groups = grouped(cells, lambda cell: (cell.spec.transport, cell.spec.dtype, cell.spec.world_size))
    differ = [len(set(values)) > 1 for values in zip(*groups, strict=True)]

    def title(way: str, dtype: str, ranks: int) -> str:
        return ", ".join(name for name, told in zip((way, dtype, f"{ranks} ranks"), differ, strict=True) if told)

    return [(key, title(*key), group) for key, group in groups.items()]


def _by_collective(cells: Sequence[CommCell]) -> dict[str, list[CommCell]]:
    return grouped(cells, lambda cell: cell.spec.collective)
