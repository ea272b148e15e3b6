"""Plots step time and peak memory of several runs: lines over a size that varies, else bars."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from steplab import stats, units
from steplab.records.disturbances import disturbance_words
from steplab.report.kit import charts as kit
from steplab.report.kit.document import Bars, Chart
from steplab.report.kit.lines import Panel, Plot, Point, line_chart, point_bars
from steplab.report.run.cells import RunCell, label, over_size, varying
from steplab.report.run.one_run import interval_words

_CAPACITY_MATTERS = 0.3  # show the device's memory once a peak reaches this share of it


def step_times(cells: Sequence[RunCell]) -> Chart | Bars | None:
    cells = [c for c in cells if c.run.samples_s or c.run.failure]
    summaries = {c.run.id: stats.summarize(samples) for c in cells if (samples := c.run.samples_s)}
    if not summaries or len(cells) < 2:
        return None  # the summary says it of a single run
    fields = varying(cells)

    def point(cell: RunCell, x: float) -> Point:
        name, summary = label(cell, fields), summaries.get(cell.run.id)
        if summary is None:
            return Point(x=x, name=name, y=None, failure=cell.run.failure)
        warnings = disturbance_words(cell.run)
        return Point(
            x=x,
            name=name,
            y=summary.median,
            figure=units.format_time(summary.median),
            detail=interval_words(summary) + (f"; warning: {warnings}" if warnings else ""),
            ends=(summary.low, summary.high),
            doubtful=bool(warnings),
        )

    scale = kit.scale([v for s in summaries.values() for v in (s.low, s.high)])
    return _chart(cells, point, Plot(name="step time", note="Median step time."), scale)


def peak_memory(cells: Sequence[RunCell]) -> Chart | Bars | None:
    cells = [c for c in cells if c.run.memory or c.run.timing or c.run.failure]
    peaks = {c.run.id: (p.peak_allocated_bytes, p.peak_reserved_bytes) for c in cells if (p := c.run.peak)}
    of_host = {c.run.id: (s, s) for c in cells if c.run.memory and (s := c.run.memory.host_peak_bytes)}
    found = peaks or of_host
    if len(cells) < 2 or not found:
        return None
    fields = varying(cells)
    totals = {c.run.memory.total_bytes for c in cells if c.run.memory and peaks} - {None}
    highest = max(reserved for _, reserved in found.values())
    total = totals.pop() if len(totals) == 1 else None
    near = total is not None and (highest >= _CAPACITY_MATTERS * total or any(c.run.failure for c in cells))
    limit = total if near else None

    def point(cell: RunCell, x: float) -> Point:
        name = label(cell, fields)
        if cell.run.id not in found:
            return Point(x=x, name=name, y=None, failure=cell.run.failure)
        allocated, reserved = found[cell.run.id]
        detail = f"{units.format_bytes(reserved)} reserved" if peaks else ""
        return Point(
            x=x,
            name=name,
            y=allocated,
            figure=units.format_bytes(allocated),
            detail=detail,
            ends=(allocated, reserved) if peaks else None,
        )

    note = "Peak memory of a step: bytes in live tensors."
    if not peaks:
        note = "Largest resident set of the measuring process, Python and libraries included: this device's "
        note += "allocator does not count live tensors."
    plot = Plot(
        name="peak memory" if peaks else "peak memory of the process",
        note=note,
        limit=limit,
        limit_name=f"device memory, {units.format_bytes(limit)}" if limit is not None else "",
    )
    scale = kit.linear_scale(max(highest, limit or 0), units.format_bytes, base=2)
    return _chart(cells, point, plot, scale)


def _chart(
    cells: Sequence[RunCell], point: Callable[[RunCell, float], Point], plot: Plot, scale: kit.Scale
) -> Chart | Bars:
    found = over_size(cells)
    if found is None:
        return point_bars(plot, [point(cell, 0.0) for cell in cells])
    axis, groups = found
    panels = [
        Panel(
            title=title,
            lines={name: [point(cell, float(cell.values[axis] or 0)) for cell in some] for name, some in lines.items()},
            scale=scale,
        )
        for title, lines in groups.items()
    ]
    note = f"{plot.note} The scale {'is logarithmic' if scale.log else 'starts at zero'}."
    points = [point for panel in panels for line in panel.lines.values() for point in line]
    if plot.name == "step time":
        note += " Whiskers are the 95 % interval of the median, or the range of fewer than six steps."
    elif any(each.ends for each in points):
        note += " Whiskers reach to the bytes held by the allocator."
    if any(each.doubtful for each in points):
        note += " Hollow marks are runs with a warning."
    return line_chart(replace(plot, axis=axis, note=note), panels)
