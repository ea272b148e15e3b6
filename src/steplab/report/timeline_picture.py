"""The timeline of one step as a picture: a row a stream, phases shaded, and one block of the model looked at closely.

A step has thousands of kernels and a page a thousand pixels. So the step is cut into columns of a pixel or so, and in
each the categories stand one on the other, as high as their share of the column's time: areas are times, and what is
left empty is idle. The close-up draws every kernel as it ran.
"""

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from steplab import units
from steplab.records.profile import CATEGORIES, Profile, Timeline
from steplab.report.close_up import Window, close_ups
from steplab.report.kit import charts as ax
from steplab.report.kit.charts import GRID, INK, MUTED, css_color
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.kernel_names import last_part, short_kernel
from steplab.report.profile_charts import category_color, category_legend

_WIDTH, _LEFT, _RIGHT = 1040, 76, 10
_TOP, _BOTTOM, _GAP = 20, 24, 8
_NAMES = 18  # height of the row of ranges
_MOST_STREAMS = 8
_COLUMNS_PX = (0.5, 1.0, 2.0, 4.0)
_MOST_CHARACTERS = 160_000
_LETTER_PX = 6.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Where time and streams stand in a picture."""

    start_ns: int
    """Time of the left edge."""
    end_ns: int
    """Time of the right edge."""
    streams: tuple[int, ...]
    """Streams, from above."""
    names: tuple[str, ...]
    """What each is called."""
    top: float
    """Upper edge of the first row."""
    row_px: float
    """Height of a row."""

    def x(self, time_ns: float) -> float:
        """Place of a time, kept within the frame."""
        inside = min(max(time_ns, self.start_ns), self.end_ns) - self.start_ns
        return _LEFT + inside * (_WIDTH - _LEFT - _RIGHT) / max(self.end_ns - self.start_ns, 1)

    def y(self, stream: int) -> float:
        """Upper edge of a stream's row."""
        return self.top + self.streams.index(stream) * (self.row_px + _GAP)

    @property
    def bottom(self) -> float:
        """Lower edge of the last row."""
        return self.top + len(self.streams) * (self.row_px + _GAP) - _GAP


def timeline_chart(profile: Profile) -> Chart | None:
    """The last profiled step, and where the trace names a block's ranges, one block forward and one backward."""
    timeline = profile.timeline
    if timeline is None or not timeline.kernel:
        return None
    word = "threads" if profile.device == "cpu" else "streams"
    streams = _busiest_streams(timeline)
    left_out = len(set(timeline.stream)) - len(streams)
    names = {stream: f"{word[:-1]} {stream}" for stream in streams}
    pictures = [step_picture(timeline, names)]
    pictures += [_close_picture(timeline, window, names) for window in close_ups(timeline)]
    shown = [category for category in CATEGORIES if category in timeline.categories]
    note = "The last of the profiled steps. Each pixel's column is filled by the categories that ran in it, as high as "
    note += "their share of its time; what is empty is idle."
    if len(pictures) > 1:
        note += " Below, one block in the middle of the model: every kernel as it ran, and the range it belongs to."
    note += f" {left_out} more {word} with less time are not drawn." if left_out else ""
    note += " The whole of it, kernel by kernel: steplab export --format perfetto."
    return Chart(pictures=tuple(pictures), legend=category_legend(shown), note=note)


def _busiest_streams(timeline: Timeline) -> tuple[int, ...]:
    busy: dict[int, int] = {}
    for stream, duration_ns in zip(timeline.stream, timeline.duration_ns, strict=True):
        busy[stream] = busy.get(stream, 0) + duration_ns
    return tuple(sorted(sorted(busy, key=lambda stream: -busy[stream])[:_MOST_STREAMS]))


def step_end_ns(timeline: Timeline) -> int:
    """When the last of its kernels and phases ends."""
    ends = [start + duration for start, duration in zip(timeline.start_ns, timeline.duration_ns, strict=True)]
    return max([*ends, *(end for _, _, end in timeline.phases)])


def step_picture(timeline: Timeline, names: Mapping[int, str], *, title: str = "", until_ns: int = 0) -> Picture:
    """The whole step, a row for each of these streams; the axis reaches to `until_ns` if that is later."""
    end_ns = step_end_ns(timeline)
    streams = tuple(names)
    row_px = 64 if len(streams) == 1 else 40 if len(streams) < 4 else 26
    frame = Frame(
        start_ns=0,
        end_ns=max(end_ns, until_ns),
        streams=streams,
        names=tuple(names.values()),
        top=_TOP,
        row_px=row_px,
    )
    body = [*_phases(timeline, frame), *_axis(frame), *_stream_names(frame)]
    drawn = ""
    for column_px in _COLUMNS_PX:
        drawn = "".join(_columns(timeline, frame, column_px))
        if len(drawn) <= _MOST_CHARACTERS:
            break
    title = f"{title or 'the step'}, {units.format_time(end_ns / 1e9)}"
    return Picture(title=title, svg=_svg(title, frame.bottom + _BOTTOM, "".join(body) + drawn), width=_WIDTH)


def column_shares(
    timeline: Timeline, stream: int, start_ns: int, end_ns: int, num_columns: int
) -> list[dict[str, float]]:
    """For each of equal columns of the time between, the share of it in which each category ran on a stream."""
    width_ns = (end_ns - start_ns) / num_columns
    shares: list[dict[str, float]] = [{} for _ in range(num_columns)]
    columns = zip(timeline.kernel, timeline.stream, timeline.start_ns, timeline.duration_ns, strict=True)
    for kernel, on, begins_ns, duration_ns in columns:
        if on != stream or width_ns <= 0:
            continue
        category = timeline.categories[kernel]
        first, last = (begins_ns - start_ns) / width_ns, (begins_ns + duration_ns - start_ns) / width_ns
        for index in range(max(int(first), 0), min(int(last) + 1, num_columns)):
            share = min(last, index + 1) - max(first, index)
            if share > 0:
                shares[index][category] = shares[index].get(category, 0.0) + share
    return shares


def _columns(timeline: Timeline, frame: Frame, column_px: float) -> Iterator[str]:
    """A path a stream and category: the category's part of every column, equal neighbours joined."""
    num_columns = int((_WIDTH - _LEFT - _RIGHT) / column_px)
    for stream in frame.streams:
        shares = column_shares(timeline, stream, frame.start_ns, frame.end_ns, num_columns)
        bars: dict[str, list[list[float]]] = {}
        for index, column in enumerate(shares):
            crowd = max(sum(column.values()), 1.0)  # kernels of one stream that overlap: an odd trace
            below = 0.0
            for category in CATEGORIES:
                if category not in column:
                    continue
                height = column[category] / crowd * frame.row_px
                bottom = round(frame.y(stream) + frame.row_px - below, 1)
                top = round(frame.y(stream) + frame.row_px - below - height, 1)
                below += height
                _extend(bars.setdefault(category, []), index, top, bottom)
        for category, drawn in bars.items():
            path = "".join(
                f"M{_LEFT + first * column_px:g} {top:g}h{count * column_px:g}V{bottom:g}h{-count * column_px:g}z"
                for first, count, top, bottom in drawn
                if bottom > top
            )
            tip = f"{category}, {units.format_time(_time_s(timeline, stream, category))} of the step"
            yield f'<g><title>{tip}</title><path d="{path}" fill="{css_color(category_color(category))}"/></g>'


def _extend(bars: list[list[float]], index: int, top: float, bottom: float) -> None:
    """Add a column's rectangle to the last one if it continues it, else as a new one."""
    if bars and bars[-1][0] + bars[-1][1] == index and bars[-1][2:] == [top, bottom]:
        bars[-1][1] += 1
    else:
        bars.append([index, 1, top, bottom])


def _time_s(timeline: Timeline, stream: int, category: str) -> float:
    columns = zip(timeline.kernel, timeline.stream, timeline.duration_ns, strict=True)
    return sum(ns for kernel, on, ns in columns if on == stream and timeline.categories[kernel] == category) / 1e9


def _close_picture(timeline: Timeline, window: Window, names: Mapping[int, str]) -> Picture:
    row_px = 40 if len(names) < 4 else 26
    used = tuple(stream for stream in names if any(timeline.stream[k] == stream for k in window.kernels))
    frame = Frame(
        start_ns=window.start_ns,
        end_ns=window.end_ns,
        streams=used,
        names=tuple(names[stream] for stream in used),
        top=4 + _NAMES,
        row_px=row_px,
    )
    body = [*_axis(frame), *_ranges(window, frame), *_stream_names(frame)]
    for index in window.kernels:
        if timeline.stream[index] in used:
            body.append(_kernel(timeline, index, frame))
    title = f"{window.title}, {units.format_time((window.end_ns - window.start_ns) / 1e9)}"
    return Picture(title=title, svg=_svg(title, frame.bottom + _BOTTOM, "".join(body)), width=_WIDTH)


def _kernel(timeline: Timeline, index: int, frame: Frame) -> str:
    kernel, start_ns, lasts_ns = timeline.kernel[index], timeline.start_ns[index], timeline.duration_ns[index]
    left, right = frame.x(start_ns), frame.x(start_ns + lasts_ns)
    name = html.escape(short_kernel(timeline.names[kernel], 160))
    category = timeline.categories[kernel]
    return (
        f"<g><title>{name}: {category}, {units.format_time(lasts_ns / 1e9)}</title>"
        f'<path d="M{left:.2f} {frame.y(timeline.stream[index]):g}h{max(right - left, 0.3):.2f}v{frame.row_px:g}'
        f'h{-max(right - left, 0.3):.2f}z" fill="{css_color(category_color(category))}"/></g>'
    )


def _ranges(window: Window, frame: Frame) -> Iterator[str]:
    """The ranges' last names above the kernels, where there is room."""
    for name, start_ns, end_ns in window.ranges:
        left, right = frame.x(start_ns), frame.x(end_ns)
        tip = f"{html.escape(name)}, {units.format_time((end_ns - start_ns) / 1e9)}"
        text = last_part(name)
        end = max(right - 0.5, left + 1)
        bracket = f"M{left + 0.5:.1f} {_NAMES + 0.5}V{_NAMES - 3.5}H{end:.1f}V{_NAMES + 0.5}"
        yield f'<g><title>{tip}</title><path d="{bracket}" fill="none" stroke="{css_color(MUTED)}"/>'
        if len(text) * _LETTER_PX <= right - left:
            yield _text((left + right) / 2, 11, text, MUTED, "middle")
        yield "</g>"


def _phases(timeline: Timeline, frame: Frame) -> Iterator[str]:
    """Shade every other phase, and name all that have room."""
    for index, (name, start_ns, end_ns) in enumerate(timeline.phases):
        left, right = frame.x(start_ns), frame.x(end_ns)
        opacity = 0.09 if index % 2 else 0.04
        tip = f"{html.escape(name)}, {units.format_time((end_ns - start_ns) / 1e9)}"
        yield (
            f'<g><title>{tip}</title><path d="M{left:.1f} 0H{right:.1f}V{frame.bottom + 4:g}H{left:.1f}z" '
            f'fill="{css_color(INK)}" fill-opacity="{opacity}"/></g>'
        )
        if len(name) * _LETTER_PX + 8 <= right - left:
            yield _text(left + 5, 14, name, INK)


def _axis(frame: Frame) -> Iterator[str]:
    scale = ax.time_scale([0.0, (frame.end_ns - frame.start_ns) / 1e9])
    for tick in scale.ticks:
        x = frame.x(frame.start_ns + tick * 1e9)
        yield f'<path d="M{x:.1f} {frame.top - 2:g}V{frame.bottom + 4:g}" stroke="{css_color(GRID)}"/>'
        yield _text(x, frame.bottom + 18, ax.tidy(scale.show(tick)), MUTED, "middle")


def _stream_names(frame: Frame) -> Iterator[str]:
    for stream, name in zip(frame.streams, frame.names, strict=True):
        yield _text(_LEFT - 8, frame.y(stream) + frame.row_px / 2 + 4, name, INK, "end")


def _text(x: float, y: float, text: str, color: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="11" text-anchor="{anchor}" fill="{css_color(color)}"'
    return f"<text {place}>{html.escape(text)}</text>"


def _svg(title: str, height: float, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="100%" role="img" '
        f'aria-label="{html.escape(title)}">{body}</svg>'
    )
