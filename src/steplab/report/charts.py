"""The pictures of a page: each a function from cells to a Chart, which is a few small SVGs and their legend.

Hover texts give exact figures, so that marks need no labels where there are many. Failures are drawn too: a
cell that ran out of memory is a result, and an empty place would read as 'not tried'.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steplab import stats, units
from steplab.records.rows import Scalar, utilization
from steplab.records.run import Run
from steplab.report import axes as ax
from steplab.report.cells import Cell, Layout, Panel, arrange, label, varying
from steplab.report.columns import reason
from steplab.report.figures import phase_median, phase_names, spread, step_median, step_samples
from steplab.report.labels import LINE, text_width, wrap
from steplab.report.shares import format_share
from steplab.report.svg import INK, MUTED, PAPER, SERIES, Drawing, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_GLYPHS = ("●", "■", "▲", "◆", "▼", "✚", "✖", "★")
_AXES_HEIGHT = 224
_WIDTH, _ROW_PX, _NAME_PX, _NAME_SIZE, _MOST_LINES = 880, 24, 330, 12, 4  # of the bars of phases and their names
_LABEL_PX = 48  # a figure beside a mark needs so much room
_MOST_BARS = 40
_CAPACITY_MATTERS = 0.3  # show the device's memory once a peak reaches this share of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One SVG."""

    title: str
    """What this panel shows; empty for the only one."""
    svg: str
    """The element."""
    width: float
    """Pixels it was drawn for."""
    subtitle: str = ""
    """What there is to say of it beside the title."""
    alarming: bool = False
    """Whether the subtitle is bad news."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Pictures that belong together."""

    pictures: tuple[Picture, ...]
    """A panel each."""
    legend: tuple[tuple[int, str, str], ...] = ()
    """Number of the colour (from 1), glyph, label; empty where there is nothing to tell apart."""
    note: str = ""
    """How to read it, and what is not shown."""


def step_times(cells: Sequence[Cell]) -> Chart | None:
    """Median step time of every cell with its 95 % interval."""
    summaries = {c.run.id: stats.summarize(samples) for c in cells if (samples := step_samples(c.run))}
    if not summaries or len(cells) < 2:
        return None  # the summary says it of a single run
    layout, fields = arrange(cells), varying(cells)
    scale = ax.time_scale([v for s in summaries.values() for v in (s.low, s.high)])

    def paint(picture: Drawing, panel: Panel, place: ax.Places) -> None:
        axes = ax.frame(picture, layout, scale, place)
        lines: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for position, series, cell in panel.marks:
            x, summary = place.x(position, series), summaries.get(cell.run.id)
            if summary is None:
                _failed(picture, axes, x, cell, fields, top=True)
                continue
            group = (series, layout.positions[position][0] if layout.inner else "")
            lines.setdefault(group, []).append((x, summary.median))
            color, show = SERIES[series % len(SERIES)], units.format_time
            axes.plot([x, x], [summary.low, summary.high], color=color, linewidth=2)
            marker = _MARKERS[series % len(_MARKERS)]
            (mark,) = axes.plot([x], [summary.median], color=color, marker=marker, markersize=7, markeredgewidth=0)
            interval = f"[{show(summary.low)}, {show(summary.high)}]"
            picture.tip(mark, f"{label(cell, fields)}: {show(summary.median)} {interval}, n = {summary.count}")
            if place.mark_px >= _LABEL_PX:
                axes.annotate(show(summary.median), (x, summary.high), (0, 7), textcoords="offset points",
                              ha="center", va="bottom", fontsize=11, color=INK)  # fmt: skip
        if _has_order(layout):
            for (series, _), points in lines.items():
                axes.plot(
                    *zip(*points, strict=True),
                    color=SERIES[series % len(SERIES)],
                    linewidth=1,
                    alpha=0.55,
                    zorder=1,
                )

    note = "Median step time; whiskers are the 95 % bootstrap interval of the median, often narrower than the "
    note += f"mark. The scale {'is logarithmic' if scale.log else 'starts at zero'}."
    return Chart(pictures=_panels(layout, "step time", paint), legend=_legend(layout, _GLYPHS), note=note)


def peak_memory(cells: Sequence[Cell]) -> Chart | None:
    """Peak allocated memory of every cell, the allocator's reserve above it, failures marked."""
    if len(cells) < 2:
        return None
    peaks = {c.run.id: p for c in cells if c.run.memory and (p := c.run.memory.peak("step"))}
    if not peaks:
        return _host_memory(cells)
    layout, fields = arrange(cells), varying(cells)
    totals = {c.run.memory.total_bytes for c in cells if c.run.memory} - {None}
    highest = max(peak.peak_reserved_bytes for peak in peaks.values())
    total = totals.pop() if len(totals) == 1 else None
    near = total is not None and (highest >= _CAPACITY_MATTERS * total or any(c.run.failure for c in cells))
    scale = ax.bytes_scale([highest], total if near else None)

    def paint(picture: Drawing, panel: Panel, place: ax.Places) -> None:
        axes = ax.frame(picture, layout, scale, place)
        if near and total is not None:
            axes.axhline(total, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            axes.text(1, total, f"device memory, {units.format_bytes(total)}", ha="right", va="bottom",
                      transform=axes.get_yaxis_transform(), fontsize=10, color=MUTED)  # fmt: skip
        for position, series, cell in panel.marks:
            x, peak, color = place.x(position, series), peaks.get(cell.run.id), SERIES[series % len(SERIES)]
            if peak is None:
                _failed(picture, axes, x, cell, fields)
                continue
            width = 0.86 * place.step
            axes.bar(x, peak.peak_reserved_bytes, width, color=color, alpha=0.3)
            (bar,) = axes.bar(x, peak.peak_allocated_bytes, width, color=color)
            sizes = (
                units.format_bytes(peak.peak_allocated_bytes),
                units.format_bytes(peak.peak_reserved_bytes),
            )
            picture.tip(bar, f"{label(cell, fields)}: {sizes[0]} allocated, {sizes[1]} reserved")

    note = "Solid: most bytes in live tensors during a step. Pale: most bytes the allocator held. "
    note += "OOM: the cell ran out of memory." if any(c.run.failure for c in cells) else ""
    return Chart(pictures=_panels(layout, "peak memory", paint), legend=_legend(layout), note=note)


def _host_memory(cells: Sequence[Cell]) -> Chart | None:
    """The process's largest resident set: all that is known where the device's allocator keeps no count."""
    sizes = {c.run.id: s for c in cells if c.run.memory and (s := c.run.memory.host_peak_bytes)}
    if not sizes:
        return None
    note = "Largest resident set of the measuring process, Python and libraries included: this device's "
    note += "allocator keeps no count of live tensors."
    return _bars(cells, sizes, ax.bytes_scale(sizes.values(), None), "peak memory of the process", note)


def mfu(cells: Sequence[Cell]) -> Chart | None:
    """MFU of every cell under the default convention."""
    used = {c.run.id: u for c in cells if (u := utilization(c.run, "mfu", "causal")) and u.value is not None}
    if not used or len(cells) < 2:
        return None
    shares = {run_id: u.value for run_id, u in used.items() if u.value is not None}
    conventions = ", ".join(sorted({u.convention for u in used.values()}))
    note = f"MFU, FLOPs counted by the convention '{conventions}', over the dense peak of each run's own data "
    note += "type: a bf16 bar and an fp32 bar are shares of different peaks."
    return _bars(cells, shares, ax.percent_scale(shares.values()), f"MFU ({conventions})", note)


def _bars(
    cells: Sequence[Cell], values: dict[str, float] | dict[str, int], scale: ax.Scale, name: str, note: str
) -> Chart:
    layout, fields = arrange(cells), varying(cells)

    def paint(picture: Drawing, panel: Panel, place: ax.Places) -> None:
        axes = ax.frame(picture, layout, scale, place)
        for position, series, cell in panel.marks:
            x, value = place.x(position, series), values.get(cell.run.id)
            if value is None:
                _failed(picture, axes, x, cell, fields)
                continue
            (bar,) = axes.bar(x, value, 0.86 * place.step, color=SERIES[series % len(SERIES)])
            picture.tip(bar, f"{label(cell, fields)}: {scale.show(value)}")
            if place.mark_px >= _LABEL_PX:
                axes.annotate(scale.show(value), (x, value), (0, 3), textcoords="offset points",
                              ha="center", va="bottom", fontsize=11, color=INK)  # fmt: skip

    return Chart(pictures=_panels(layout, name, paint), legend=_legend(layout), note=note)


def phases(cells: Sequence[Cell]) -> Chart | None:
    """What a step is made of: its parts as shares of their sum, a bar a run."""
    chosen = _parted(cells)
    if not chosen:
        return None
    shown = spread(sorted(chosen, key=lambda c: step_median(c.run) or 0), _MOST_BARS)
    shown = [cell for cell in chosen if cell in shown]
    fields = varying(chosen)
    names = list(dict.fromkeys(name for cell in shown for name in phase_names(cell.run)))
    labels = [label(cell, fields) for cell in shown]
    lines = [wrap(text, _NAME_PX, _NAME_SIZE, _MOST_LINES) for text in labels]
    left = 12 + max(text_width(line, _NAME_SIZE) for text in lines for line in text)
    heights = [_ROW_PX + (len(text) - 1) * LINE * _NAME_SIZE for text in lines]
    centers = [sum(heights[:index]) + height / 2 for index, height in enumerate(heights)]
    with drawing(_WIDTH, 16 + sum(heights), "parts of a step") as picture:
        axes = picture.axes(left, 8, 84, 8)
        axes.set_xlim(0, 1)
        axes.set_ylim(sum(heights), 0)
        axes.set_yticks(centers, ["\n".join(text) for text in lines], fontsize=_NAME_SIZE, color=INK)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        for text, name in zip(axes.get_yticklabels(), labels, strict=True):
            text.set(linespacing=LINE)
            if text.get_text() != name:
                picture.tip(text, name)
        for center, cell in zip(centers, shown, strict=True):
            _phase_bar(picture, axes, center, cell.run, names)
    legend = tuple((i % len(SERIES) + 1, "■", name) for i, name in enumerate(names))
    note = "Share of each part in the step, by median time back to back; at the right, the median step."
    if any(_uncovered(cell.run) for cell in shown):
        note += " What a bar leaves empty is time in no part."
    if len(shown) < len(chosen):
        note += f" {len(shown)} of {len(chosen)} runs, spread from the fastest to the slowest."
    return Chart(pictures=(Picture(title="", svg=picture.to_svg(), width=_WIDTH),), legend=legend, note=note)


def _parted(cells: Sequence[Cell]) -> list[Cell]:
    """The runs whose parts are worth a bar: loops of one's own with any, and steps of several.

    A forward-backward cell says nothing that its training cell does not.
    """
    trained = {_but_for_the_pass(cell) for cell in cells if "optimizer" in phase_names(cell.run)}

    def worth_a_bar(cell: Cell) -> bool:
        names = phase_names(cell.run)
        if cell.run.spec is None:
            return len(names) > 0
        return len(names) > 1 and ("optimizer" in names or _but_for_the_pass(cell) not in trained)

    return [cell for cell in cells if worth_a_bar(cell)]


def _but_for_the_pass(cell: Cell) -> tuple[Scalar, ...]:
    return tuple(value for field, value in cell.values.items() if field not in ("pass", "optimizer"))


def _part_times(run: Run) -> tuple[dict[str, float], float]:
    """Median of every part, and the whole that a bar shows: the step, or the parts' sum where that is more."""
    times = {name: phase_median(run, name) or 0.0 for name in phase_names(run)}
    return times, max(sum(times.values()), step_median(run) or 0.0) or 1.0


def _uncovered(run: Run) -> bool:
    """Whether a part of the step that one would see is in no part."""
    times, whole = _part_times(run)
    return sum(times.values()) < 0.98 * whole


def _phase_bar(picture: Drawing, axes: "Axes", center: float, run: Run, names: Sequence[str]) -> None:
    start, (times, total) = 0.0, _part_times(run)
    for name, time_s in times.items():
        share = time_s / total
        (bar,) = axes.barh(center, share, 0.72 * _ROW_PX, start, color=SERIES[names.index(name) % len(SERIES)])
        picture.tip(bar, f"{name}: {units.format_time(time_s)}, {format_share(share)} of the bar's whole")
        if share >= 0.07:
            axes.text(
                start + share / 2,
                center,
                f"{100 * share:.0f} %",
                ha="center",
                va="center",
                color=PAPER,
                fontsize=11,
            )
        start += share
    whole = step_median(run)
    if whole is not None:
        axes.text(1.012, center, units.format_time(whole), ha="left", va="center", fontsize=12, color=INK)


def _panels(layout: Layout, name: str, paint: Callable[[Drawing, Panel, ax.Places], None]) -> tuple[Picture, ...]:
    width = ax.chart_width(layout)
    pictures = []
    for panel in layout.panels:
        title = f"{name}, {panel.title}" if panel.title else name
        place = ax.places(layout, width)
        with drawing(width, _AXES_HEIGHT + ax.below(layout, place).height_px, title) as picture:
            paint(picture, panel, place)
            pictures.append(Picture(title=panel.title, svg=picture.to_svg(), width=width))
    return tuple(pictures)


def _legend(layout: Layout, glyphs: Sequence[str] = ("■",)) -> tuple[tuple[int, str, str], ...]:
    if len(layout.series) < 2:
        return ()
    return tuple(
        (index % len(SERIES) + 1, glyphs[index % len(glyphs)], name) for index, name in enumerate(layout.series)
    )


def _has_order(layout: Layout) -> bool:
    """Whether x is a quantity: only between its values does a line mean something."""
    return (layout.inner or layout.outer) in ("context", "batch")


def _failed(picture: Drawing, axes: "Axes", x: float, cell: Cell, fields: Sequence[str], *, top: bool = False) -> None:
    failure = cell.run.failure
    if failure is None:
        return  # measured, but not this figure: the page says why
    word = ax.mark_failure(axes, x, ax.failure_word(failure.kind), top=top)
    picture.tip(word, f"{label(cell, fields)}: {reason(failure.kind, failure.message)}")
