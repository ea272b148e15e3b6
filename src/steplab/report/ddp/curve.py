"""Plots step time over bucket size, measured and by the overhead model.

A point is the usual step without communication plus the variant's exposed communication. Both steps alternated, so a
drift of the machine cancels.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.ddp import DdpCell, DdpRun, OverheadModel
from steplab.report.ddp import figures
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import INK, MUTED, Drawing, drawing, put_line, put_mark, series_legend
from steplab.report.kit.document import Chart
from steplab.report.kit.grouping import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 640, 280
_LEFT, _BELOW, _RIGHT, _TOP = 64, 44, 16, 10
_OVERLAPPED = (0, (6, 3))


def bucket_curve(run: DdpRun) -> Chart | None:
    sized = [cell for cell in figures.timed(run) if cell.contender.bucket_size_mb is not None]
    families = grouped(sized, lambda cell: cell.contender.family)
    if not any(len(cells) > 1 for cells in families.values()):
        return None
    without_s = figures.usual_baseline_s(run)
    if without_s is None:
        return None
    lines = {family: points for family, cells in families.items() if (points := _points(cells, without_s))}
    values = [seconds for points in lines.values() for _, seconds in points]
    if not values:
        return None
    scale = _scale([*values, without_s])
    curves = _model_curves(run.model, without_s, scale.high)
    with drawing(_WIDTH, _HEIGHT, "step time over bucket size") as picture:
        axes = _frame(picture, [size for points in lines.values() for size, _ in points], scale)
        line = axes.axhline(without_s, color=MUTED, linewidth=1)
        picture.tip(line, f"without communication: {units.format_time(without_s)}")
        for (name, points), style in zip(curves.items(), (_OVERLAPPED, kit.DOTTED), strict=False):
            (line,) = axes.plot(*zip(*points, strict=True), color=INK, linewidth=1.4, linestyle=style)
            picture.tip(line, name)
        for index, (family, points) in enumerate(lines.items()):
            put_line(axes, points, index)
            for size_mb, seconds in points:
                mark = put_mark(axes, size_mb, seconds, index)
                picture.tip(mark, f"{family}, {size_mb:g} MB: {units.format_time(seconds)}")
    return Chart(pictures=(picture.picture(),), legend=series_legend(lines), note=_note(run.model))


def _points(cells: Sequence[DdpCell], without_s: float) -> list[tuple[float, float]]:
    return sorted(
        (cell.contender.bucket_size_mb, without_s + added_s)
        for cell in cells
        if cell.contender.bucket_size_mb is not None and (added_s := figures.exposed_s(cell)) is not None
    )


def _scale(values: Sequence[float]) -> kit.Scale:
    """Not from zero, because differences may be a few per cent of the step."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(values), max(values)
    room = max(high - low, 0.02 * high)
    low, high = low - 0.1 * room, high + 0.15 * room
    ticks = tuple(float(tick) for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high)
    return kit.Scale(low=low, high=high, log=False, ticks=ticks, show=lambda value: f"{1e3 * value:.5g} ms")


def _model_curves(
    model: OverheadModel | None, without_s: float, highest: float
) -> dict[str, list[tuple[float, float]]]:
    if model is None:
        return {}
    exposed = [(point.bucket_mb, without_s + point.exposed_s) for point in model.curve]
    serial = [(point.bucket_mb, without_s + point.serial_s) for point in model.curve]
    curves = {"model, all calls overlapped": exposed, "model, each call's overhead exposed": serial}
    kept = {name: [point for point in points if point[1] <= highest] for name, points in curves.items()}
    return {name: points for name, points in kept.items() if len(points) > 1}


def _frame(picture: Drawing, sizes_mb: Sequence[float], scale: kit.Scale) -> "Axes":
    axes = picture.axes(_LEFT, _BELOW, _RIGHT, _TOP)
    axes.set_xscale("log")
    axes.set_xlim(min(sizes_mb) / 1.6, max(sizes_mb) * 1.6)
    scale.put_on(axes)
    low, high = math.floor(math.log10(min(sizes_mb))), math.ceil(math.log10(max(sizes_mb)))
    ticks = [10.0**power for power in range(low, high + 1) if min(sizes_mb) / 1.6 <= 10.0**power <= max(sizes_mb) * 1.6]
    axes.set_xticks(ticks, [f"{tick:g} MB" for tick in ticks], fontsize=11, color=INK)
    axes.set_xlabel("bucket size, 1 MB = 1,000,000 bytes", fontsize=11)
    axes.grid(axis="y")
    return axes


def _note(model: OverheadModel | None) -> str:
    note = (
        "Step time over bucket size: the step without communication (the level line, the median of those measured in "
    )
    note += "turns) plus what communication adds to it. The axis does not begin at zero."
    if model is None:
        return note + " The model has no curve: too little was measured to fit a bandwidth and an overhead per call."
    return (
        f"{note} Dashed: the model in which the last bucket is exposed when the backward pass ends, or whatever the "
        f"link has not sent by then. Dotted: the overhead of every call is exposed as well. The model is fitted to the "
        f"communication alone of {model.num_fitted} variants, {units.format_message(model.gradient_bytes)} at "
        f"{units.format_rate(model.bytes_per_s, 'B/s')} and {units.format_time(model.call_s)} per call, with an error "
        f"of at most {units.format_percent(model.worst_fit)}. The dotted curve is lowest for buckets of "
        f"{model.best_bucket_mb:.3g} MB, with {units.format_time(model.least_serial_s)} exposed. In "
        "neither does communication slow computation."
    )
