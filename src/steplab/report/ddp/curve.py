"""Plots step time over bucket size, as measured and as the fitted overhead model (records.ddp.OverheadModel) predicts.

A measured point is the study's median step without communication plus the variant's exposed communication. The latter
is a difference between alternating steps, so a drift of the machine cancels.
"""

from collections.abc import Sequence

from steplab import units
from steplab.records.ddp import DdpCell, DdpRun, OverheadModel
from steplab.report.ddp import figures
from steplab.report.kit import charts as kit
from steplab.report.kit.document import Chart
from steplab.report.kit.grouping import grouped
from steplab.report.kit.lines import Curve, Panel, Plot, Point, line_chart


def bucket_curve(run: DdpRun) -> Chart | None:
    sized = [cell for cell in figures.timed(run) if cell.contender.bucket_size_mb is not None]
    families = grouped(sized, lambda cell: cell.contender.family)
    without_s = figures.usual_baseline_s(run)
    if without_s is None or not any(len(cells) > 1 for cells in families.values()):
        return None
    lines = {family: points for family, cells in families.items() if (points := _points(cells, without_s))}
    if not lines:
        return None
    scale = _scale([without_s, *(point.y for points in lines.values() for point in points if point.y is not None)])
    plot = Plot(
        name="step time over bucket size",
        note=_note(run.model),
        axis="bucket size, 1 MB = 1,000,000 bytes",
        show_x=lambda size_mb: f"{size_mb:g} MB",
        limit=without_s,
        limit_name=f"without communication: {units.format_time(without_s)}",
    )
    curves = _model_curves(run.model, without_s, scale.high)
    return line_chart(plot, [Panel(title="", lines=lines, scale=scale, curves=curves)])


def _points(cells: Sequence[DdpCell], without_s: float) -> list[Point]:
    return [
        Point(
            x=size_mb,
            y=without_s + added_s,
            name=f"{cell.contender.family}, {size_mb:g} MB",
            figure=units.format_time(without_s + added_s),
        )
        for cell in cells
        if (size_mb := cell.contender.bucket_size_mb) is not None and (added_s := figures.exposed_s(cell)) is not None
    ]


def _scale(values: Sequence[float]) -> kit.Scale:
    """Scale that does not begin at zero, because the times may differ by only a few per cent."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(values), max(values)
    room = max(high - low, 0.02 * high)
    low, high = low - 0.1 * room, high + 0.15 * room
    ticks = tuple(float(tick) for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high)
    return kit.Scale(low=low, high=high, log=False, ticks=ticks, show=lambda value: f"{1e3 * value:.5g} ms")


def _model_curves(model: OverheadModel | None, without_s: float, highest: float) -> list[Curve]:
    points = model.curve if model else ()
    curves = (
        ("model, all calls overlapped", kit.DASHED, [(p.bucket_mb, without_s + p.exposed_s) for p in points]),
        ("model, each call's overhead exposed", kit.DOTTED, [(p.bucket_mb, without_s + p.serial_s) for p in points]),
    )
    inside = [(name, style, [point for point in points if point[1] <= highest]) for name, style, points in curves]
    return [Curve(name=name, points=points, style=style) for name, style, points in inside if len(points) > 1]


def _note(model: OverheadModel | None) -> str:
    note = (
        "Step time over bucket size: the step without communication (the grey level line, the median of those "
        "measured in turns) plus what communication adds to it. The axis does not begin at zero."
    )
    if model is None:
        return note + " The model has no curve: too little was measured to fit a bandwidth and an overhead per call."
    return (
        f"{note} Dashed: the model in which the last bucket is exposed when the backward pass "
        f"of {units.format_time(model.backward_s)} ends, or whatever the "
        f"link has not sent by then. Dotted: the overhead of every call is exposed as well. The model is fitted to the "
        f"communication alone of {model.num_fitted} variants, {units.format_message(model.gradient_bytes)} at "
        f"{units.format_rate(model.bytes_per_s, 'B/s')} and {units.format_time(model.call_s)} per call, with an error "
        f"of at most {units.format_percent(model.worst_fit)}. The dotted curve is lowest for buckets of "
        f"{model.best_bucket_mb:.3g} MB, with {units.format_time(model.least_serial_s)} exposed. In "
        "neither does communication slow computation."
    )
