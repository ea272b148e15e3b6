"""Charts of a benchmark of attention: rates and memory over sequence length, one line per implementation.

Shapes that differ only in sequence length share a panel; the others share one more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.attention import AttentionCell
from steplab.report.attention.figures import PASS_WORDS, shape_label
from steplab.report.kit import axes as ax
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import MUTED, Drawing, put_line, put_mark, series_legend
from steplab.report.kit.document import Chart
from steplab.report.kit.grouping import grouped
from steplab.specs.hardware import Peak, find_hardware

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figure = Callable[[AttentionCell], float | None]
_BESIDE_OTHERS = 440.0
_FACTORS = "; lengths grow by factors too"
_WORD_PX = 13.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Panel:
    title: str
    positions: tuple[str, ...]
    marks: tuple[tuple[int, AttentionCell], ...]
    ordered: bool
    """True if positions are lengths, joined by lines."""


@dataclass(frozen=True, slots=True)
class _Plot:
    figure: Figure
    scale: kit.Scale
    name: str
    show: Callable[[float], str]
    limit: float | None = None


def rate_chart(cells: Sequence[AttentionCell], name: str, device: str | None = None) -> Chart | None:
    """With the device's dense peak if all cells share a dtype; None if the pass was not timed."""
    figure = partial(AttentionCell.flops_per_s, name=name)
    values = [value for cell in cells if (value := figure(cell)) is not None]
    if not values:
        return None
    peak = _peak(cells, device)
    note = f"FLOP/s of {PASS_WORDS[name]}: FLOPs by the record's convention over the median time."
    note += f" The dashed line is the dense peak that the data sheet of {device} states." if peak else ""
    scale = kit.count_scale([*values, *([peak.flops_per_s] if peak else [])])
    note += " The axis is logarithmic." if scale.log else ""
    show = partial(units.format_rate, unit="FLOP/s")
    return _chart(cells, _Plot(figure, scale, PASS_WORDS[name], show, peak.flops_per_s if peak else None), note)


def _peak(cells: Sequence[AttentionCell], device: str | None) -> Peak | None:
    dtypes = {cell.spec.dtype for cell in cells}
    hardware = find_hardware(device) if device else None
    return hardware.peak_flops(dtypes.pop()) if hardware and len(dtypes) == 1 else None


def memory_chart(cells: Sequence[AttentionCell], saved: bool) -> Chart | None:
    def figure(cell: AttentionCell) -> float | None:
        memory = cell.memory
        return (memory.saved_bytes if saved else memory.both_peak_bytes) if memory else None

    values = [value for cell in cells if (value := figure(cell))]
    if not values:
        return None
    what = "Memory saved for backward" if saved else "Peak of forward and backward"
    factors = any(panel.ordered for panel in _panels(cells))
    note = f"{what}, beyond the inputs, on a logarithmic axis{_FACTORS if factors else ''}."
    scale = kit.log_bytes_scale(values)
    return _chart(cells, _Plot(figure, scale, what.lower(), units.format_bytes), note)


def _chart(cells: Sequence[AttentionCell], plot: _Plot, note: str) -> Chart:
    series = tuple(dict.fromkeys(cell.spec.column for cell in cells))
    pictures = []
    panels = _panels(cells)
    for panel in panels:
        positions = tuple((position, "") for position in panel.positions)
        outer = "sequence" if panel.ordered else None
        layout = ax.Layout(outer=outer, inner=None, positions=positions, series=series, ordered=panel.ordered)
        width = ax.chart_width(layout) if len(panels) == 1 or not panel.ordered else _BESIDE_OTHERS
        title = f"{plot.name}, {panel.title}" if panel.title else plot.name
        with ax.panel(layout, plot.scale, title, width) as (picture, axes, place):
            if plot.limit is not None:
                line = axes.axhline(plot.limit, color=MUTED, linewidth=1, linestyle=kit.DASHED)
                picture.tip(line, f"dense peak: {plot.show(plot.limit)}")
            for index, column in enumerate(series):
                _paint(picture, axes, panel, place, plot, index, column)
            pictures.append(picture.picture(panel.title))
    return Chart(pictures=tuple(pictures), legend=series_legend(series), note=note)


def _paint(
    picture: Drawing, axes: "Axes", panel: _Panel, place: ax.Places, plot: _Plot, index: int, column: str
) -> None:
    """Failures are marked where a slow or a large cell would be: at the bottom for rates, at the top for memory."""
    points = []
    for position, cell in sorted((mark for mark in panel.marks if mark[1].spec.column == column), key=lambda m: m[0]):
        value, name = plot.figure(cell), f"{cell.spec.label} {column}"
        if value is not None:
            x = place.centers[position] if panel.ordered else place.x(position, index)
            picture.tip(put_mark(axes, x, value, index), f"{name}: {plot.show(value)}")
            points.append((x, value))
        elif cell.failure:
            x = _beside_others(panel, place, plot, position, cell) if panel.ordered else place.x(position, index)
            kit.mark_failure(picture, axes, x, cell.failure, name, top=plot.limit is None and plot.scale.log)
    if panel.ordered:
        put_line(axes, points, index)


def _beside_others(panel: _Panel, place: ax.Places, plot: _Plot, position: int, cell: AttentionCell) -> float:
    failed = [other for at, other in panel.marks if at == position and other.failure and plot.figure(other) is None]
    offset = failed.index(cell) - (len(failed) - 1) / 2
    return place.centers[position] + offset * _WORD_PX / place.position_px


def _panels(cells: Sequence[AttentionCell]) -> list[_Panel]:
    def but_for_length(cell: AttentionCell) -> tuple[object, ...]:
        spec = cell.spec
        return spec.batch, spec.heads, spec.kv_heads, spec.dim, spec.causal, spec.dtype, spec.queries == spec.keys

    groups = grouped(cells, but_for_length)
    panels, alone = [], []
    for group in groups.values():
        lengths = sorted({cell.spec.queries for cell in group})
        if len(lengths) < 2 or group[0].spec.queries != group[0].spec.keys:
            alone += group
            continue
        marks = tuple((lengths.index(cell.spec.queries), cell) for cell in group)
        title = _shared(group[0]) if len(groups) > 1 else ""
        panels.append(_Panel(title=title, positions=tuple(map(str, lengths)), marks=marks, ordered=True))
    if alone:
        shapes = list(dict.fromkeys(cell.spec.shape for cell in alone))
        marks = tuple((shapes.index(cell.spec.shape), cell) for cell in alone)
        labels = tuple(shape_label(shape, shapes).replace("×", " × ") for shape in shapes)
        panels.append(_Panel(title="", positions=labels, marks=marks, ordered=False))
    return panels


def _shared(cell: AttentionCell) -> str:
    spec = cell.spec
    heads = f"{spec.heads} heads" if spec.heads > 1 else "1 head"
    return f"batch {spec.batch}, {heads} of {spec.dim}, {'causal, ' if spec.causal else ''}{spec.dtype}"
