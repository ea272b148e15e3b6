from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.profile import Profile, Timeline
from steplab.report.kit.charts import MUTED, Drawing, category_color, category_legend
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.kernel_names import last_part, short_kernel
from steplab.report.kit.labels import text_width
from steplab.report.kit.timelines import LETTERS, ROW, step_picture, stream_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = 0.6  # height of the names of ranges, in rows
_MOST_STREAMS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseUp:
    title: str
    start_ns: int
    """Nanoseconds since the start of the step."""
    end_ns: int
    ranges: tuple[tuple[str, int, int], ...]
    kernels: tuple[int, ...]


def timeline_chart(profile: Profile) -> Chart | None:
    """Draw the last profiled step and, if ranges mark blocks, one block in forward and in backward."""
    timeline = profile.timeline
    if timeline is None or not timeline.kernel:
        return None
    word = "threads" if profile.device == "cpu" else "streams"
    streams = _busiest_streams(timeline)
    left_out = len(set(timeline.stream)) - len(streams)
    names = {stream: f"{word[:-1]} {stream}" for stream in streams}
    pictures = [step_picture(timeline, names)]
    pictures += [_close_picture(timeline, window, names) for window in close_ups(timeline)]
    note = "The last of the profiled steps. Each column is filled by the categories that ran in it, as high as "
    note += "their share of its time; empty is idle."
    if len(pictures) > 1:
        note += " Below, one block in the middle of the model, with every kernel and the range it belongs to."
    note += f" {left_out} more {word} with less time are not drawn." if left_out else ""
    return Chart(pictures=tuple(pictures), legend=category_legend(timeline.categories), note=note)


def _busiest_streams(timeline: Timeline) -> tuple[int, ...]:
    busy: dict[int, int] = {}
    for stream, duration_ns in zip(timeline.stream, timeline.duration_ns, strict=True):
        busy[stream] = busy.get(stream, 0) + duration_ns
    return tuple(sorted(sorted(busy, key=lambda stream: -busy[stream])[:_MOST_STREAMS]))


def _close_picture(timeline: Timeline, window: CloseUp, names: Mapping[int, str]) -> Picture:
    rows = {stream: row for row, stream in enumerate(_used(timeline, window, names))}
    title = f"{window.title}, {units.format_time((window.end_ns - window.start_ns) / 1e9)}"
    used = tuple(names[stream] for stream in rows)
    with stream_axes(title, used, window.start_ns, window.end_ns, above=_NAMES) as (picture, axes):
        drawn = [index for index in window.kernels if timeline.stream[index] in rows]
        kinds = [timeline.kernel[index] for index in drawn]
        bars = axes.barh(
            [rows[timeline.stream[index]] for index in drawn],
            [timeline.duration_ns[index] for index in drawn],
            ROW,
            [timeline.start_ns[index] for index in drawn],
            align="edge",
            color=[category_color(timeline.categories[kind]) for kind in kinds],
        )
        for patch, index, kind in zip(bars, drawn, kinds, strict=True):
            name, category = short_kernel(timeline.names[kind], 160), timeline.categories[kind]
            picture.tip(patch, f"{name}: {category}, {units.format_time(timeline.duration_ns[index] / 1e9)}")
        _ranges(picture, axes, window)
    return picture.picture(title)


def _used(timeline: Timeline, window: CloseUp, names: Mapping[int, str]) -> list[int]:
    return [stream for stream in names if any(timeline.stream[k] == stream for k in window.kernels)]


def _ranges(picture: Drawing, axes: "Axes", window: CloseUp) -> None:
    px_per_ns = axes.bbox.width / (window.end_ns - window.start_ns)
    for name, start_ns, end_ns in window.ranges:
        ends = [start_ns, start_ns, end_ns, end_ns]
        (bracket,) = axes.plot(ends, [-0.05, -0.15, -0.15, -0.05], color=MUTED, linewidth=1)
        picture.tip(bracket, f"{name}, {units.format_time((end_ns - start_ns) / 1e9)}")
        text = last_part(name)
        if text_width(text, LETTERS) <= (end_ns - start_ns) * px_per_ns:
            axes.text((start_ns + end_ns) / 2, -0.2, text, fontsize=LETTERS, color=MUTED, ha="center", va="bottom")


_PHASES = ("forward", "backward")
_MOST_KERNELS = 400


def close_ups(timeline: Timeline) -> list[CloseUp]:
    """Choose one block in the middle of each pass, if ranges mark blocks."""
    spans = [(name, start, end) for name, start, end in timeline.phases if name in _PHASES]
    windows = (_block(timeline, name, start, end) for name, start, end in spans)
    return [window for window in windows if window is not None]


def _block(timeline: Timeline, phase: str, phase_start_ns: int, phase_end_ns: int) -> CloseUp | None:
    """Ranges lack layer numbers, so a block starts where a once-per-block range repeats."""
    inside = [r for r in timeline.ranges if phase_start_ns <= r[1] < phase_end_ns and "*" in r[0]]
    counts = Counter(name for name, *_ in inside)
    repeated = Counter(count for count in counts.values() if count > 1)
    if not repeated:
        return None
    once = max(repeated, key=lambda count: (repeated[count], -count))  # most ranges are entered once a block
    first = next(name for name, *_ in inside if counts[name] == once)
    starts = [start for name, start, *_ in inside if name == first]
    middle = (len(starts) - 1) // 2
    start_ns, end_ns = starts[middle], starts[middle + 1]
    kernels = tuple(k for k, start in enumerate(timeline.start_ns) if start_ns <= start < end_ns)
    if not kernels or end_ns <= start_ns or len(kernels) > _MOST_KERNELS:
        return None
    return CloseUp(
        title=f"one block of {len(starts)}, {phase}",
        start_ns=start_ns,
        end_ns=end_ns,
        ranges=tuple((name, start, end) for name, start, end, _ in timeline.ranges if start_ns <= start < end_ns),
        kernels=kernels,
    )
