"""Plots rates and memory over sequence length, one line per implementation; a single length gives bars."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from steplab import units
from steplab.records.attention import AttentionCell
from steplab.report.attention.figures import PASS_WORDS
from steplab.report.kit import charts as kit
from steplab.report.kit.document import Bars, Deferred, later
from steplab.report.kit.grouping import grouped
from steplab.report.kit.lines import Panel, Plot, Point, line_chart, point_bars
from steplab.specs.hardware import Peak, find_hardware

Figure = Callable[[AttentionCell], float | None]


def rate_charts(cells: Sequence[AttentionCell], name: str, device: str | None = None) -> Iterator[Deferred | Bars]:
    """Plot FLOP/s of the pass `name`; yields nothing if no cell timed that pass.

    A line shows the device's dense peak, if it is known and all cells share a dtype.
    """
    figure = partial(AttentionCell.flops_per_s, name=name)
    values = [value for cell in cells if (value := figure(cell)) is not None]
    if not values:
        return
    peak = _peak(cells, device)
    note = f"FLOP/s of {PASS_WORDS[name]}: FLOPs by the record's convention over the median time."
    note += f" The dashed line is the dense peak that the data sheet of {device} states." if peak else ""
    show = partial(units.format_rate, unit="FLOP/s")
    plot = Plot(
        name=PASS_WORDS[name],
        note=note,
        axis="sequence",
        failures_on_top=False,
        limit=peak.flops_per_s if peak else None,
        limit_name=f"dense peak: {show(peak.flops_per_s)}" if peak else "",
    )
    scale = kit.scale([*values, *([peak.flops_per_s] if peak else [])], units.format_count)
    yield from _charts(cells, plot, scale, partial(_point, figure=figure, show=show))


def _peak(cells: Sequence[AttentionCell], device: str | None) -> Peak | None:
    dtypes = {cell.spec.dtype for cell in cells}
    hardware = find_hardware(device) if device else None
    return hardware.peak_flops(dtypes.pop()) if hardware and len(dtypes) == 1 else None


def memory_charts(cells: Sequence[AttentionCell], saved: bool) -> Iterator[Deferred | Bars]:
    def figure(cell: AttentionCell) -> float | None:
        memory = cell.memory
        return (memory.saved_bytes if saved else memory.both_peak_bytes) or None if memory else None

    if values := [value for cell in cells if (value := figure(cell))]:
        what = "Memory saved for backward" if saved else "Peak of forward and backward"
        plot = Plot(name=what.lower(), note=f"{what}, beyond the inputs.", axis="sequence")
        point = partial(_point, figure=figure, show=units.format_bytes)
        yield from _charts(cells, plot, kit.log_bytes_scale(values), point)


def _charts(
    cells: Sequence[AttentionCell], plot: Plot, scale: kit.Scale, point: Callable[[AttentionCell], Point]
) -> Iterator[Deferred | Bars]:
    def but_for_length(cell: AttentionCell) -> tuple[object, ...]:
        spec = cell.spec
        return spec.batch, spec.heads, spec.kv_heads, spec.dim, spec.causal, spec.dtype, spec.queries == spec.keys

    groups = list(grouped(cells, but_for_length).values())
    sized = [
        group
        for group in groups
        if group[0].spec.queries == group[0].spec.keys and len({cell.spec.queries for cell in group}) > 1
    ]
    if sized:
        note = f"{plot.note} Lengths are on a logarithmic axis{', as is the height' if scale.log else ''}."
        panels = [
            Panel(
                title=_shared(group[0]) if len(groups) > 1 else "",
                lines={
                    column: list(map(point, some))
                    for column, some in grouped(group, lambda cell: cell.spec.column).items()
                },
                scale=scale,
            )
            for group in sized
        ]
        yield later(line_chart, replace(plot, note=note), panels)
    if alone := [cell for group in groups if group not in sized for cell in group]:
        yield point_bars(plot, list(map(point, alone)))


def _point(cell: AttentionCell, figure: Figure, show: Callable[[float], str]) -> Point:
    y = figure(cell)
    name = f"{cell.spec.label} {cell.spec.column}"
    return Point(x=cell.spec.queries, y=y, name=name, figure="" if y is None else show(y), failure=cell.failure)


def _shared(cell: AttentionCell) -> str:
    spec = cell.spec
    heads = f"{spec.heads} heads" if spec.heads > 1 else "1 head"
    return f"batch {spec.batch}, {heads} of {spec.dim}, {'causal, ' if spec.causal else ''}{spec.dtype}"
