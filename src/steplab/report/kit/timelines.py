"""Draws the timeline of one step, with one row per stream and shaded phases.

In columns of a few pixels, each category is as high as its share of the time, so areas are times and empty space is
idle time.
"""

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.profile import CATEGORIES, Timeline
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import GRID, INK, MUTED, category_color, css_color, svg
from steplab.report.kit.document import Picture

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WIDTH, _LEFT, _RIGHT = 1040, 76, 10
_TOP, BOTTOM, _GAP = 20, 24, 8
_COLUMNS_PX = (2.0, 3.0, 4.0)
_MOST_CHARACTERS = 12_000
LETTERS, LETTER_PX = 11, 6.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    start_ns: int
    end_ns: int
    streams: tuple[int, ...]
    names: tuple[str, ...]
    top: float
    row_px: float

    def x(self, time_ns: float) -> float:
        inside = min(max(time_ns, self.start_ns), self.end_ns) - self.start_ns
        return _LEFT + inside * (WIDTH - _LEFT - _RIGHT) / max(self.end_ns - self.start_ns, 1)

    def y(self, stream: int) -> float:
        return self.top + self.streams.index(stream) * (self.row_px + _GAP)

    @property
    def bottom(self) -> float:
        return self.top + len(self.streams) * (self.row_px + _GAP) - _GAP


def step_end_ns(timeline: Timeline) -> int:
    ends = [start + duration for start, duration in zip(timeline.start_ns, timeline.duration_ns, strict=True)]
    return max([*ends, *(end for _, _, end in timeline.phases)])


def step_picture(timeline: Timeline, names: Mapping[int, str], *, title: str = "", until_ns: int = 0) -> Picture:
    """One row per stream in `names`; the axis ends at `until_ns` if later."""
    end_ns = step_end_ns(timeline)
    streams = tuple(names)
    row_px = 64 if len(streams) == 1 else 40 if len(streams) < 4 else 26
    frame = Frame(
        start_ns=0, end_ns=max(end_ns, until_ns), streams=streams, names=tuple(names.values()), top=_TOP, row_px=row_px
    )
    body = [*_phases(timeline, frame), *axis(frame), *stream_names(frame)]
    drawn = short_enough(lambda column_px: _columns(timeline, frame, column_px), _COLUMNS_PX, _MOST_CHARACTERS)
    title = f"{title or 'the step'}, {units.format_time(end_ns / 1e9)}"
    return Picture(title=title, svg=svg(title, WIDTH, frame.bottom + BOTTOM, "".join(body) + drawn), width=WIDTH)


def column_shares(
    timeline: Timeline, stream: int, start_ns: int, end_ns: int, num_columns: int
) -> dict[str, "NDArray[np.float64]"]:
    """In `num_columns` equal parts, on one stream."""
    import numpy as np

    edges = np.linspace(start_ns, end_ns, num_columns + 1)
    kinds = np.array([CATEGORIES.index(name) for name in timeline.categories])[np.array(timeline.kernel, dtype=int)]
    here = np.array(timeline.stream) == stream
    starts = np.array(timeline.start_ns, dtype=float)
    ends = starts + np.array(timeline.duration_ns)

    def passed_ns(times: "NDArray[np.float64]") -> "NDArray[np.float64]":
        times = np.sort(times)
        count = np.searchsorted(times, edges)
        return count * edges - np.concatenate(([0.0], np.cumsum(times)))[count]

    shares = {}
    for kind in np.unique(kinds[here]):
        of_kind = here & (kinds == kind)
        busy_ns = passed_ns(starts[of_kind]) - passed_ns(ends[of_kind])
        shares[CATEGORIES[kind]] = np.diff(busy_ns) * num_columns / max(end_ns - start_ns, 1)
    return shares


def _columns(timeline: Timeline, frame: Frame, column_px: float) -> Iterator[str]:
    import numpy as np

    num_columns = int((WIDTH - _LEFT - _RIGHT) / column_px)
    for stream in frame.streams:
        shares = column_shares(timeline, stream, frame.start_ns, frame.end_ns, num_columns)
        crowd = np.maximum(sum(shares.values()), 1.0)  # kernels of one stream that overlap: an odd trace
        floor = frame.y(stream) + frame.row_px
        below = np.zeros(num_columns)
        for category, share in shares.items():
            above = below + share / crowd
            bottoms, tops = (np.round(2 * (floor - frame.row_px * edge)) / 2 for edge in (below, above))
            below = above
            tip = f"{category}, {units.format_time(_time_s(timeline, stream, category))} of the step"
            path = _rectangles(tops, bottoms, column_px)
            yield titled(tip, f'<path d="{path}" fill="{css_color(category_color(category))}"/>')


def _rectangles(tops: "NDArray[np.float64]", bottoms: "NDArray[np.float64]", column_px: float) -> str:
    """One rectangle per run of equal columns. Moves are relative and paths unclosed, for pages with hundreds of
    thousands.
    """
    import numpy as np

    changes = np.flatnonzero((np.diff(tops) != 0) | (np.diff(bottoms) != 0)) + 1
    runs = zip((0, *changes.tolist()), (*changes.tolist(), len(tops)), strict=True)
    path, at_x, at_y = [], 0.0, 0.0
    for first, last in runs:
        top, bottom = float(tops[first]), float(bottoms[first])
        if bottom > top:
            x, width = _LEFT + first * column_px, (last - first) * column_px
            down = f" {top - at_y:g}" if top >= at_y else f"{top - at_y:g}"
            path.append(f"m{x - at_x:g}{down}h{width:g}v{bottom - top:g}h{-width:g}")
            at_x, at_y = x, bottom
    return "".join(path)


def _time_s(timeline: Timeline, stream: int, category: str) -> float:
    columns = zip(timeline.kernel, timeline.stream, timeline.duration_ns, strict=True)
    return sum(ns for kernel, on, ns in columns if on == stream and timeline.categories[kernel] == category) / 1e9


def _phases(timeline: Timeline, frame: Frame) -> Iterator[str]:
    for index, (name, start_ns, end_ns) in enumerate(timeline.phases):
        left, right = frame.x(start_ns), frame.x(end_ns)
        tip = f"{name}, {units.format_time((end_ns - start_ns) / 1e9)}"
        yield shade(left, right, frame.bottom + 4, 0.09 if index % 2 else 0.04, tip)
        if len(name) * LETTER_PX + 8 <= right - left:
            yield words_at(left + 5, 14, name, INK)


def axis(frame: Frame) -> Iterator[str]:
    scale = kit.time_scale([0.0, (frame.end_ns - frame.start_ns) / 1e9])
    for tick in scale.ticks:
        x = frame.x(frame.start_ns + tick * 1e9)
        yield f'<path d="M{x:.1f} {frame.top - 2:g}V{frame.bottom + 4:g}" stroke="{css_color(GRID)}"/>'
        yield words_at(x, frame.bottom + 18, kit.tidy(scale.show(tick)), MUTED, "middle")


def stream_names(frame: Frame) -> Iterator[str]:
    for stream, name in zip(frame.streams, frame.names, strict=True):
        yield words_at(_LEFT - 8, frame.y(stream) + frame.row_px / 2 + 4, name, INK, "end")


def words_at(x: float, y: float, text: str, color: str = INK, anchor: str = "start") -> str:
    """In pixels. The page's style sheet gives ink-coloured text a halo."""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{LETTERS}" text-anchor="{anchor}"'
    return f'<text {place} style="fill: {css_color(color)}">{html.escape(text)}</text>'


def shade(left: float, right: float, bottom: float, opacity: float, tip: str) -> str:
    box = f'd="M{left:.1f} 0H{right:.1f}V{bottom:g}H{left:.1f}z"'
    return titled(tip, f'<path {box} fill="{css_color(INK)}" fill-opacity="{opacity}"/>')


def titled(tip: str, body: str) -> str:
    return f"<g><title>{html.escape(tip)}</title>{body}</g>"


def short_enough(paint: Callable[[float], Iterable[str]], widths_px: Sequence[float], most: int) -> str:
    """`paint` with the first of these column widths within the limit of characters, else the last."""
    drawn = ""
    for column_px in widths_px:
        drawn = "".join(paint(column_px))
        if len(drawn) <= most:
            break
    return drawn
