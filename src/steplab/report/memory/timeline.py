"""Draws allocated bytes over a step, stacked by category, with shaded phases and the peak.

Each column of pixels shows its moment with the most bytes, so every column is a real state, and the peak is visible.
Categories are painted from the top of the stack down to zero, which leaves no gaps.
"""

from typing import TYPE_CHECKING

from steplab import units
from steplab.records.memory_profile import MemoryProfile, MemoryTimeline
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import INK, MUTED, PAPER, Drawing, drawing
from steplab.report.kit.document import Chart
from steplab.report.kit.timelines import LETTERS, WIDTH, shade_phases
from steplab.report.memory.categories import category_word, color_of, legend_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 346, 62, 10, 22, 24
NUM_COLUMNS = 322
_CAPACITY_MATTERS = 0.6  # show the device's memory once a peak reaches this share of it


def memory_timeline(profile: MemoryProfile, capacity: int | None = None) -> Chart | None:
    """Draw allocated bytes over time; None without a recorded timeline.

    A line shows `capacity`, the device's bytes, if the peak comes near it.
    """
    timeline = profile.timeline
    shown = [name for name, sizes in _by_category(timeline) if any(sizes)]
    if not (timeline.time_s and timeline.categories):
        return None
    near = capacity if capacity is not None and profile.peak_bytes >= _CAPACITY_MATTERS * capacity else None
    with drawing(WIDTH, _HEIGHT, "memory over time") as picture:
        axes = picture.axes(_LEFT, _BOTTOM, _RIGHT, _TOP)
        start_s = min([timeline.time_s[0], *(phase.start_s for phase in profile.phases)])
        end_s = max([timeline.time_s[-1], profile.peak_s, *(phase.end_s for phase in profile.phases)])
        axes.set_xlim(start_s, max(end_s, start_s + 1e-9))
        kit.linear_scale(max(1, profile.peak_bytes, near or 0), units.format_bytes, base=2).put_on(axes)
        axes.grid(axis="y")
        _time_axis(axes, timeline, start_s, end_s)
        spans = [
            (phase.name, phase.start_s, phase.end_s, f"{phase.name}: peak {units.format_bytes(phase.peak_bytes)}")
            for phase in profile.phases
        ]
        shade_phases(picture, axes, spans)
        _areas(picture, axes, profile)
        _marks(picture, axes, profile, near)
    note = "Allocated bytes by category; each column of pixels shows its fullest moment. The dot is the peak. "
    if timeline.by_event:
        note += "The horizontal axis counts events, because the history has no clock times."
    else:
        note += "Recording slows the step down: the time axis is not the step time."
    return Chart(pictures=(picture.picture(),), legend=legend_of(shown), note=note)


def _by_category(timeline: MemoryTimeline) -> "zip[tuple[str, tuple[int, ...]]]":
    return zip(timeline.categories, timeline.allocated_bytes, strict=True)


def fullest_moments(timeline: MemoryTimeline, start_s: float, end_s: float, num_columns: int) -> list[int | None]:
    """For each of `num_columns` equal columns, the index of the moment with the most bytes; None before the first.

    A moment lasts until the next. A moment on the border of two columns belongs to the second.
    """
    totals = [sum(sizes) for sizes in zip(*timeline.allocated_bytes, strict=True)]
    per_s = num_columns / ((end_s - start_s) or 1)
    edges = [(time_s - start_s) * per_s for time_s in timeline.time_s]
    fullest: list[int | None] = [None] * num_columns
    for moment, begins in enumerate(edges):
        ends = edges[moment + 1] if moment + 1 < len(edges) else float(num_columns)
        first = min(max(int(begins), 0), num_columns - 1)
        last = int(ends) - (ends == int(ends))
        for column in range(first, min(max(last, first), num_columns - 1) + 1):
            held = fullest[column]
            if held is None or totals[moment] > totals[held]:
                fullest[column] = moment
    return fullest


def _areas(picture: Drawing, axes: "Axes", profile: MemoryProfile) -> None:
    import numpy as np

    start_s, end_s = axes.get_xlim()
    moments = fullest_moments(profile.timeline, start_s, end_s, NUM_COLUMNS)
    filled, stack = np.zeros(NUM_COLUMNS), []
    for category, sizes in _by_category(profile.timeline):
        filled = filled + [0 if moment is None else sizes[moment] for moment in moments]
        if any(sizes):
            stack.append((category, max(sizes), filled))
    edges = np.linspace(start_s, end_s, NUM_COLUMNS + 1)
    for category, most, heights in reversed(stack):
        area = axes.stairs(heights, edges, fill=True, color=color_of(category), linewidth=0)
        at_peak = units.format_bytes(profile.at_peak.get(category, 0))
        picture.tip(area, f"{category_word(category)}: {at_peak} at the peak, at most {units.format_bytes(most)}")


def _time_axis(axes: "Axes", timeline: MemoryTimeline, start_s: float, end_s: float) -> None:
    scale = kit.scale([0.0, end_s - start_s])
    ticks = [tick for tick in scale.ticks if tick <= end_s - start_s]
    show = (lambda count: units.format_count(count).rstrip()) if timeline.by_event else scale.show
    axes.tick_params(axis="x", pad=7)
    axes.set_xticks([start_s + tick for tick in ticks], [kit.tidy(show(tick)) for tick in ticks], fontsize=LETTERS)


def _marks(picture: Drawing, axes: "Axes", profile: MemoryProfile, capacity: int | None) -> None:
    if capacity is not None:
        axes.axhline(capacity, color=MUTED, linewidth=1, linestyle=kit.DASHED)
        axes.annotate(f"device memory {units.format_bytes(capacity)}", (1, capacity), (-4, 4),
                      xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
                      fontsize=LETTERS, color=MUTED)  # fmt: skip
    (dot,) = axes.plot([profile.peak_s], [profile.peak_bytes], "o", color=INK, markersize=8, clip_on=False,
                       markeredgecolor=PAPER, markeredgewidth=1.5)  # fmt: skip
    picture.tip(dot, f"peak {units.format_bytes(profile.peak_bytes)}, {profile.peak_phase or 'the peak'}")
