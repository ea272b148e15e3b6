"""Draws the memory of a step over time: stacked categories, shaded phases, and the peak.

Each column of one or more pixels shows its moment with the most allocated bytes, so columns are real states, and the
peak is drawn. Categories are painted from the top of the stack down, each to zero, which leaves no gaps.
"""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from steplab import units
from steplab.printing import plain
from steplab.records.memory_profile import MemoryPhase, MemoryProfile, MemoryTimeline
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import GRID, INK, MUTED, PAPER, css_color, svg
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.labels import fitted, text_width
from steplab.report.kit.timelines import LETTERS, shade, short_enough, titled, words_at
from steplab.report.memory.categories import category_word, color_of, legend_of

WIDTH, HEIGHT = 1040.0, 300.0
"""In pixels."""
LEFT, RIGHT, STRIP, BOTTOM = 62, 10, 22, 24
"""Margins in pixels: left (sizes), right, top (names of phases), bottom (times)."""
GAP = 8
"""Between labels, in pixels."""
_COLUMNS_PX = (1.0, 2.0, 4.0, 8.0)
_MOST_CHARACTERS = 60_000
_CAPACITY_MATTERS = 0.6  # show the device's memory once a peak reaches this share of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    start_s: float
    end_s: float
    scale: kit.Scale

    @property
    def bottom(self) -> float:
        return STRIP + HEIGHT

    @property
    def right(self) -> float:
        return WIDTH - RIGHT

    def x(self, time_s: float) -> float:
        inside = min(max(time_s, self.start_s), self.end_s) - self.start_s
        return LEFT + inside * (self.right - LEFT) / ((self.end_s - self.start_s) or 1)

    def y(self, num_bytes: float) -> float:
        return self.bottom - num_bytes / self.scale.high * (self.bottom - STRIP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def text_box(x: float, y: float, text: str, anchor: str) -> Box:
    width = text_width(text, LETTERS)
    left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
    return Box(left=left, top=y - LETTERS, right=left + width, bottom=y + 3)


def memory_timeline(profile: MemoryProfile, capacity: int | None = None) -> Chart | None:
    """The device's memory, if known, is drawn where the peak comes near it. None without a recording."""
    timeline = profile.timeline
    if not (timeline.time_s and timeline.categories):
        return None
    near = capacity if capacity is not None and profile.peak_bytes >= _CAPACITY_MATTERS * capacity else None
    scale = kit.bytes_scale([1, profile.peak_bytes], near)
    scale = replace(scale, high=1.08 * scale.high)  # room for a label above the highest mark
    note = "Allocated bytes by category; each column of pixels shows its fullest moment. The dot is the peak. "
    if timeline.by_event:
        note += "The horizontal axis counts events, because the history has no clock times."
    else:
        note += "Recording slows the step down: the time axis is not the step time."
    picture = Picture(title="", svg=_picture(profile, scale, near), width=WIDTH)
    return Chart(pictures=(picture,), legend=legend_of(categories_of(timeline)), note=note)


def categories_of(timeline: MemoryTimeline) -> list[str]:
    pairs = zip(timeline.categories, timeline.allocated_bytes, strict=True)
    return [name for name, sizes in pairs if any(sizes)]


def _picture(profile: MemoryProfile, scale: kit.Scale, capacity: int | None) -> str:
    timeline, phases = profile.timeline, profile.phases
    frame = Frame(
        start_s=min([timeline.time_s[0], *(phase.start_s for phase in phases)]),
        end_s=max([timeline.time_s[-1], profile.peak_s, *(phase.end_s for phase in phases)]),
        scale=scale,
    )
    body = [*_phases(phases, frame), *_bytes_axis(frame), *_time_axis(timeline, frame)]
    areas = short_enough(lambda column_px: _areas(profile, frame, column_px), _COLUMNS_PX, _MOST_CHARACTERS)
    names = [words_at(left, 15, text) for left, text in phase_labels(phases, frame)]
    body += [areas, *_borders(phases, frame), *names, *_marks(profile, frame, capacity)]
    return svg("memory over time", WIDTH, frame.bottom + BOTTOM, "".join(body))


def fullest_moments(timeline: MemoryTimeline, start_s: float, end_s: float, num_columns: int) -> list[int | None]:
    """Index of the moment with the most bytes in each of `num_columns` equal columns; None before the first.

    A moment lasts until the next. A moment between two columns belongs to the second.
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
    yield f"M{LEFT} {frame.bottom:g}"
    drawn = f"{frame.bottom:g}"
    for column, height in enumerate(heights):
        y = f"{round(2 * frame.y(height)) / 2:g}"
        if y != drawn:
            yield f"{f'H{LEFT + column * width:.4g}' if column else ''}V{y}"
            drawn = y
    yield f"H{frame.right:g}V{frame.bottom:g}z"


def _phases(phases: Sequence[MemoryPhase], frame: Frame) -> Iterator[str]:
    for index, phase in enumerate(phases):
        left, right = frame.x(phase.start_s), frame.x(phase.end_s)
        tip = f"{phase.name}: peak {units.format_bytes(phase.peak_bytes)}"
        yield shade(left, right, frame.bottom, 0.1 if index % 2 else 0.04, tip)


def _borders(phases: Sequence[MemoryPhase], frame: Frame) -> Iterator[str]:
    for phase in phases[1:]:
        line = f'd="M{frame.x(phase.start_s):.1f} 0V{frame.bottom:g}"'
        yield f'<path {line} stroke="{css_color(INK)}" stroke-opacity="0.45" stroke-dasharray="2 3"/>'


def _bytes_axis(frame: Frame) -> Iterator[str]:
    for tick in frame.scale.ticks:
        y = frame.y(tick)
        yield f'<path d="M{LEFT} {y:.1f}H{frame.right:g}" stroke="{css_color(GRID)}"/>'
        yield words_at(LEFT - 8, y + 4, kit.tidy(frame.scale.show(tick)), MUTED, "end")


def _time_axis(timeline: MemoryTimeline, frame: Frame) -> Iterator[str]:
    scale = kit.time_scale([0.0, frame.end_s - frame.start_s])
    ticks = [tick for tick in scale.ticks if tick <= frame.end_s - frame.start_s]
    show = (lambda count: units.format_count(count).rstrip()) if timeline.by_event else scale.show
    texts = [kit.tidy(show(tick)) for tick in ticks]
    room = (frame.right - LEFT) / max(len(ticks), 1)
    every = 1 if max(text_width(text, LETTERS) for text in texts) + GAP <= room else 2
    for tick, text in list(zip(ticks, texts, strict=True))[::every]:
        x = frame.x(frame.start_s + tick)
        yield f'<path d="M{x:.1f} {frame.bottom:g}v5" stroke="{css_color(MUTED)}"/>'
        half = text_width(text, LETTERS) / 2
        yield words_at(min(x, WIDTH - half - 1), frame.bottom + 18, text, MUTED, "middle")


def peak_place(profile: MemoryProfile, frame: Frame) -> tuple[float, float, str]:
    x = frame.x(profile.peak_s)
    half = text_width(peak_text(profile), LETTERS) / 2
    anchor = "start" if x - half < LEFT else "end" if x + half > frame.right else "middle"
    return x, frame.y(profile.peak_bytes), anchor


def peak_text(profile: MemoryProfile) -> str:
    return f"peak {units.format_bytes(profile.peak_bytes)}"


def _marks(profile: MemoryProfile, frame: Frame, capacity: int | None) -> Iterator[str]:
    x, y, anchor = peak_place(profile, frame)
    text = peak_text(profile)
    if capacity is not None:
        line = frame.y(capacity)
        yield f'<path d="M{LEFT} {line:.1f}H{frame.right:g}" stroke="{css_color(MUTED)}" stroke-dasharray="4 3"/>'
        name = fitted(f"device memory {units.format_bytes(capacity)}", frame.right - LEFT, LETTERS)
        at, above, side = _capacity_place(name, line, text_box(x, y - 9, text, anchor), frame)
        yield words_at(at, above, name, MUTED, side)
    look = f'fill="{css_color(INK)}" stroke="{css_color(PAPER)}" stroke-width="1.5"'
    yield titled(f"{text}, {profile.peak_phase or 'the peak'}", f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {look}/>')
    yield words_at(x, y - 9, text, INK, anchor)


def _capacity_place(name: str, line: float, peak: Box, frame: Frame) -> tuple[float, float, str]:
    for at, side in ((frame.right, "end"), (LEFT, "start")):
        if not text_box(at, line - 5, name, side).meets(peak):
            return at, line - 5, side
    return frame.right, peak.top - 4, "end"


def phase_labels(phases: Sequence[MemoryPhase], frame: Frame) -> list[tuple[float, str]]:
    """Left edge and text of each phase's label, centered on its phase and moved aside to avoid overlap.

    Without room for all, the shortest phases have only hover texts.
    """
    kept = list(phases)
    while kept:
        texts = [fitted(plain(phase.name), frame.right - LEFT, LETTERS) for phase in kept]
        widths = [text_width(text, LETTERS) for text in texts]
        if sum(widths) + GAP * (len(kept) - 1) <= frame.right - LEFT:
            middles = [(frame.x(phase.start_s) + frame.x(phase.end_s)) / 2 for phase in kept]
            return list(zip(_spread(middles, widths, LEFT, frame.right), texts, strict=True))
        kept.remove(min(kept, key=lambda phase: phase.end_s - phase.start_s))
    return []


def _spread(middles: Sequence[float], widths: Sequence[float], left: float, right: float) -> list[float]:
    lefts: list[float] = []
    for middle, width in zip(middles, widths, strict=True):
        lefts.append(max(middle - width / 2, left))
        left = lefts[-1] + width + GAP
    for index in range(len(lefts) - 1, -1, -1):
        lefts[index] = min(lefts[index], right - widths[index])
        right = lefts[index] - GAP
    return lefts
