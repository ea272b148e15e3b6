"""The memory of a step over time as a picture: categories stacked, phases shaded, the peak marked.

A history has millions of events and a picture a thousand pixels. So time is cut into columns of a pixel or two, and
each shows the moment in it at which most was allocated: every column is a state that the memory was in, and no peak is
lost. The stack is painted from the uppermost category down, each from its upper edge to zero, so that nothing shines
through between two of them.
"""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from steplab import units
from steplab.records.memory_profile import MemoryPhase, MemoryProfile, MemoryTimeline
from steplab.report.kit import charts as ax
from steplab.report.kit.charts import GRID, INK, MUTED, css_color
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.labels import fitted, text_width
from steplab.report.memory_frame import BOTTOM, GAP, LEFT, NARROW, WIDE, Frame, phase_labels
from steplab.report.memory_shapes import (
    LETTERS,
    Box,
    color_of,
    dot,
    legend_of,
    picture,
    text_at,
    text_box,
    titled,
)
from steplab.report.memory_words import category_word

_COLUMNS_PX = (1.0, 2.0, 4.0, 8.0)
_MOST_CHARACTERS = 60_000
_CAPACITY_MATTERS = 0.6  # show the device's memory once a peak reaches this share of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A profile to draw."""

    title: str
    """What tells it from its neighbours; empty where it is alone."""
    profile: MemoryProfile
    """The record."""
    capacity: int | None = None
    """Memory of the device; None: not known, or none of its own."""


def memory_timelines(shown: Sequence[Shown]) -> Chart | None:
    """A picture each, wide if there is one and side by side if there are several, with one scale of bytes for all.

    None where nothing was recorded.
    """
    drawable = [one for one in shown if one.profile.timeline.time_s and one.profile.timeline.categories]
    if not drawable:
        return None
    width = WIDE if len(drawable) == 1 else NARROW
    near = capacity_to_show(drawable)
    scale = byte_scale([one.profile.peak_bytes for one in drawable], near)
    pictures = tuple(
        Picture(title=one.title, svg=_picture(one, width, scale, near), width=width, subtitle=_subtitle(one))
        for one in drawable
    )
    categories = [name for one in drawable for name in categories_of(one.profile.timeline)]
    return Chart(pictures=pictures, legend=legend_of(categories), note=_note(drawable))


def capacity_to_show(shown: Sequence[Shown]) -> int | None:
    """The device's memory, where all have the same and some peak comes near it."""
    found = {one.capacity for one in shown}
    capacity = found.pop() if len(found) == 1 else None
    highest = max(one.profile.peak_bytes for one in shown)
    return capacity if capacity is not None and highest >= _CAPACITY_MATTERS * capacity else None


def byte_scale(peaks: Sequence[int], capacity: int | None) -> ax.Scale:
    """From zero, with room for a label above the highest mark."""
    scale = ax.bytes_scale([max(1, *peaks)], capacity)
    return replace(scale, high=1.08 * scale.high)


def categories_of(timeline: MemoryTimeline) -> list[str]:
    """The categories that were ever there, as they are stacked."""
    pairs = zip(timeline.categories, timeline.allocated_bytes, strict=True)
    return [name for name, sizes in pairs if any(sizes)]


def _subtitle(one: Shown) -> str:
    if not one.title:
        return ""
    phase = f", in {one.profile.peak_phase}" if one.profile.peak_phase else ""
    return f"peak {units.format_bytes(one.profile.peak_bytes)}{phase}"


def _note(shown: Sequence[Shown]) -> str:
    note = "Allocated bytes by category; each column of pixels shows its fullest moment. The dot is the peak."
    note += " All pictures have the same scale of bytes." if len(shown) > 1 else ""
    if any(one.profile.timeline.by_event for one in shown):
        note += " Along the axis events are counted, for the history has no clock times."
    else:
        note += " Watching slows the host: the axis is the watched step's time, not the step time."
    return note


def _picture(one: Shown, width: float, scale: ax.Scale, capacity: int | None) -> str:
    timeline, phases = one.profile.timeline, one.profile.phases
    frame = Frame(
        width=width,
        start_s=min([timeline.time_s[0], *(phase.start_s for phase in phases)]),
        end_s=max([timeline.time_s[-1], one.profile.peak_s, *(phase.end_s for phase in phases)]),
        scale=scale,
    )
    body = [*_phases(phases, frame), *_bytes_axis(frame), *_time_axis(timeline, frame)]
    areas = ""
    for column_px in _COLUMNS_PX:
        areas = "".join(_areas(one.profile, frame, column_px))
        if len(areas) <= _MOST_CHARACTERS:
            break
    body += [areas, *_borders(phases, frame), *_phase_names(phases, frame), *_marks(one.profile, frame, capacity)]
    name = f"memory over time{f', {one.title}' if one.title else ''}"
    return picture(name, width, frame.bottom + BOTTOM, "".join(body))


def fullest_moments(timeline: MemoryTimeline, start_s: float, end_s: float, num_columns: int) -> list[int | None]:
    """For each of equal columns of the time between, which moment in it had most bytes; None before the first.

    A moment lasts until the next one, the last one to the end; one that begins on an edge is of the column after it.
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


def _areas(profile: MemoryProfile, frame: Frame, column_px: float) -> Iterator[str]:
    """A path a category, from the uppermost down: its upper edge, and straight down to zero."""
    timeline = profile.timeline
    num_columns = max(int((frame.right - LEFT) / column_px), 1)
    moments = fullest_moments(timeline, frame.start_s, frame.end_s, num_columns)
    width = (frame.right - LEFT) / num_columns
    below = [0] * len(timeline.time_s)
    paths = []
    for category, sizes in zip(timeline.categories, timeline.allocated_bytes, strict=True):
        if not any(sizes):
            continue
        below = [low + size for low, size in zip(below, sizes, strict=True)]
        path = "".join(_upper_edge([0 if m is None else below[m] for m in moments], frame, width))
        at_peak = profile.at_peak.get(category, 0)
        tip = f"{category_word(category)}: {units.format_bytes(at_peak)} at the peak, at most "
        tip += units.format_bytes(max(sizes))
        fill = css_color(color_of(category))
        paths.append(f'<path d="{path}" fill="{fill}"><title>{html.escape(tip)}</title></path>')
    return reversed(paths)


def _upper_edge(heights: Sequence[int], frame: Frame, width: float) -> Iterator[str]:
    """Steps from column to column, equal neighbours joined, closed along the bottom."""
    yield f"M{LEFT} {frame.bottom:g}"
    drawn = f"{frame.bottom:g}"
    for column, height in enumerate(heights):
        y = f"{round(frame.y(height), 1):g}"
        if y != drawn:
            yield f"{f'H{LEFT + column * width:.4g}' if column else ''}V{y}"
            drawn = y
    yield f"H{frame.right:g}V{frame.bottom:g}z"


def _phases(phases: Sequence[MemoryPhase], frame: Frame) -> Iterator[str]:
    """Shade every other phase more."""
    for index, phase in enumerate(phases):
        left, right = frame.x(phase.start_s), frame.x(phase.end_s)
        opacity = 0.1 if index % 2 else 0.04
        box = f'd="M{left:.1f} 0H{right:.1f}V{frame.bottom:g}H{left:.1f}z"'
        shade = f'<path {box} fill="{css_color(INK)}" fill-opacity="{opacity}"/>'
        yield titled(f"{phase.name}: peak {units.format_bytes(phase.peak_bytes)}", shade)


def _borders(phases: Sequence[MemoryPhase], frame: Frame) -> Iterator[str]:
    """Where one phase ends and the next begins, over the areas."""
    for phase in phases[1:]:
        line = f'd="M{frame.x(phase.start_s):.1f} 0V{frame.bottom:g}"'
        yield f'<path {line} stroke="{css_color(INK)}" stroke-opacity="0.45" stroke-dasharray="2 3"/>'


def _phase_names(phases: Sequence[MemoryPhase], frame: Frame) -> Iterator[str]:
    for left, text in phase_labels(phases, frame):
        yield text_at(left, 15, text)


def _bytes_axis(frame: Frame) -> Iterator[str]:
    for tick in frame.scale.ticks:
        y = frame.y(tick)
        yield f'<path d="M{LEFT} {y:.1f}H{frame.right:g}" stroke="{css_color(GRID)}"/>'
        yield text_at(LEFT - 8, y + 4, ax.tidy(frame.scale.show(tick)), MUTED, "end")


def _time_axis(timeline: MemoryTimeline, frame: Frame) -> Iterator[str]:
    scale = ax.time_scale([0.0, frame.end_s - frame.start_s])
    ticks = [tick for tick in scale.ticks if tick <= frame.end_s - frame.start_s]
    show = (lambda count: units.format_count(count).rstrip()) if timeline.by_event else scale.show
    texts = [ax.tidy(show(tick)) for tick in ticks]
    room = (frame.right - LEFT) / max(len(ticks), 1)
    every = 1 if max(text_width(text, LETTERS) for text in texts) + GAP <= room else 2
    for tick, text in list(zip(ticks, texts, strict=True))[::every]:
        x = frame.x(frame.start_s + tick)
        yield f'<path d="M{x:.1f} {frame.bottom:g}v5" stroke="{css_color(MUTED)}"/>'
        half = text_width(text, LETTERS) / 2
        yield text_at(min(x, frame.width - half - 1), frame.bottom + 18, text, MUTED, "middle")


def peak_place(profile: MemoryProfile, frame: Frame) -> tuple[float, float, str]:
    """Middle of the peak's mark, and on which side of it the label begins."""
    x = frame.x(profile.peak_s)
    half = text_width(peak_text(profile), LETTERS) / 2
    anchor = "start" if x - half < LEFT else "end" if x + half > frame.right else "middle"
    return x, frame.y(profile.peak_bytes), anchor


def peak_text(profile: MemoryProfile) -> str:
    """The label at the peak."""
    return f"peak {units.format_bytes(profile.peak_bytes)}"


def _marks(profile: MemoryProfile, frame: Frame, capacity: int | None) -> Iterator[str]:
    """The peak, and the device's memory."""
    x, y, anchor = peak_place(profile, frame)
    text = peak_text(profile)
    if capacity is not None:
        line = frame.y(capacity)
        yield f'<path d="M{LEFT} {line:.1f}H{frame.right:g}" stroke="{css_color(MUTED)}" stroke-dasharray="4 3"/>'
        name = fitted(f"device memory {units.format_bytes(capacity)}", frame.right - LEFT, LETTERS)
        at, above, side = _capacity_place(name, line, text_box(x, y - 9, text, anchor), frame)
        yield text_at(at, above, name, MUTED, side)
    yield titled(f"{text}, {profile.peak_phase or 'the peak'}", dot(x, y, INK))
    yield text_at(x, y - 9, text, INK, anchor)


def _capacity_place(name: str, line: float, peak: Box, frame: Frame) -> tuple[float, float, str]:
    """Where the name of the capacity's line stands: on the line beside the peak's label, else above that."""
    for at, side in ((frame.right, "end"), (LEFT, "start")):
        if not text_box(at, line - 5, name, side).meets(peak):
            return at, line - 5, side
    return frame.right, peak.top - 4, "end"
