"""Plots collectives over message size: one panel per backend and world size, one line per collective."""

from collections.abc import Callable, Sequence

from steplab import units
from steplab.records.comm import CommCell, CommFit
from steplab.report.kit.charts import Scale, linear_scale, scale
from steplab.report.kit.document import Chart
from steplab.report.kit.grouping import grouped
from steplab.report.kit.lines import Curve, Panel, Plot, Point, line_chart
from steplab.report.kit.quantities import GB_PER_S

_AXIS = "message size"
_CURVE_POINTS = 40


def time_over_size(cells: Sequence[CommCell], profile: Sequence[CommFit]) -> Chart | None:
    panels = _panels(cells, _median_s, lambda values: scale(values, log_from=1), profile)
    note = "Median time of the slowest rank. Both axes are logarithmic."
    note += " Dashed lines are the fitted α + β · bytes." if any(panel.curves for panel in panels) else ""
    return (
        line_chart(Plot(name="time of a call", note=note, axis=_AXIS, show_x=units.format_message), panels)
        if panels
        else None
    )


def bandwidth_over_size(cells: Sequence[CommCell]) -> Chart | None:
    if len({cell.spec.size_bytes for cell in cells}) < 2:
        return None
    note = "Bus bandwidth by the median time of the slowest rank, in GB/s (1e9 bytes per second). Message sizes are on "
    note += "a logarithmic axis; the bandwidth starts at zero."
    panels = _panels(cells, lambda cell: cell.bus_bandwidth, _gigabytes, ())
    plot = Plot(name="bus bandwidth", note=note, axis=_AXIS, show_x=units.format_message, failures_on_top=False)
    return line_chart(plot, panels) if panels else None


def _median_s(cell: CommCell) -> float | None:
    return cell.slowest.median_s if cell.slowest else None


def _gigabytes(values: Sequence[float]) -> Scale:
    return linear_scale(max(values), lambda value: f"{value / 1e9:g}")


def _panels(
    cells: Sequence[CommCell],
    y: Callable[[CommCell], float | None],
    scale_of: Callable[[Sequence[float]], Scale],
    profile: Sequence[CommFit],
) -> list[Panel]:
    groups = grouped(cells, lambda cell: (cell.spec.transport, cell.spec.dtype, cell.spec.world_size))
    differ = [len(set(names)) > 1 for names in zip(*groups, strict=True)]
    panels = []
    for (way, dtype, ranks), group in groups.items():
        values = [value for cell in cells if cell.spec.transport == way and (value := y(cell)) is not None]
        if not values:
            continue
        lines = grouped(group, lambda cell: cell.spec.collective)
        fits = [fit for fit in profile if (fit.way, fit.dtype, fit.world_size) == (way, dtype, ranks)]
        told = zip((way, dtype, f"{ranks} ranks"), differ, strict=True)
        panels.append(
            Panel(
                title=", ".join(word for word, differs in told if differs),
                lines={name: [_point(cell, y(cell)) for cell in some] for name, some in lines.items()},
                scale=scale_of(values),
                curves=[_curve(lines[fit.collective], fit) for fit in fits if fit.collective in lines],
            )
        )
    return panels


def _point(cell: CommCell, y: float | None) -> Point:
    figure = ""
    if cell.slowest:
        figure = f"{units.format_time(cell.slowest.median_s)}, {GB_PER_S.show(cell.bus_bandwidth)} GB/s"
    return Point(x=cell.spec.size_bytes, y=y, name=cell.spec.label, figure=figure, failure=cell.failure)


def _curve(cells: Sequence[CommCell], fit: CommFit) -> Curve:
    timed = [cell for cell in cells if cell.slowest and cell.wire_bytes is not None]
    low, high = min(cell.spec.size_bytes for cell in timed), max(cell.spec.size_bytes for cell in timed)
    factor = timed[-1].wire_bytes / timed[-1].message_bytes if timed[-1].wire_bytes else 0.0
    xs = [low * (high / low) ** (step / _CURVE_POINTS) for step in range(_CURVE_POINTS + 1)]
    points = [(x, fit.alpha_s + fit.beta_s_per_byte * factor * x) for x in xs]
    return Curve(name=fit.collective, points=points)
