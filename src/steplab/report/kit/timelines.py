"""Draws the kernels of one step over time, with one row per stream and shaded phases.

Each column of a few pixels is filled by category in proportion to time, so areas are times and empty space is idle
time.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from steplab import units
from steplab.printing import plain
from steplab.records.profile import CATEGORIES, Timeline
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import INK, Drawing, category_color, category_legend, drawing
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.labels import text_width

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1040, 76, 10, 20, 24
_COLUMN_PX = 3
LETTERS = 11
ROW = 0.85


def step_end_ns(timeline: Timeline) -> int:
    ends = [start + duration for start, duration in zip(timeline.start_ns, timeline.duration_ns, strict=True)]
    return max([*ends, *(end for _, _, end in timeline.phases)])


def step_picture(
    timeline: Timeline, names: Mapping[int, str], *, title: str = "", until_ns: int = 0, subtitle: str = ""
) -> Picture:
    """Draw one row per stream in `names`; the axis ends with the step, or later at `until_ns`."""
    end_ns = step_end_ns(timeline)
    title = f"{title or 'the step'}, {units.format_time(end_ns / 1e9)}"
    with stream_axes(title, tuple(names.values()), 0, max(end_ns, until_ns)) as (picture, axes):
        spans = [
            (name, start, end, f"{name}, {units.format_time((end - start) / 1e9)}")
            for name, start, end in timeline.phases
        ]
        shade_phases(picture, axes, spans)
        for row, stream in enumerate(names):
            _columns(picture, axes, timeline, stream, row)
    return picture.picture(title, subtitle=subtitle)


def steps_chart(steps: Sequence[tuple[str, Timeline, Mapping[int, str], str]], note: str) -> Chart:
    """Draw (title, timeline, streams' names, subtitle) of several steps on a common time axis."""
    until_ns = max(step_end_ns(timeline) for _, timeline, _, _ in steps)
    pictures = tuple(
        step_picture(timeline, names, title=title, until_ns=until_ns, subtitle=subtitle)
        for title, timeline, names, subtitle in steps
    )
    categories = {category for _, timeline, _, _ in steps for category in timeline.categories}
    return Chart(pictures=pictures, legend=category_legend(categories), note=note)


@contextlib.contextmanager
def stream_axes(
    title: str, names: tuple[str, ...], start_ns: int, end_ns: int, above: float = 0.0
) -> Iterator[tuple[Drawing, "Axes"]]:
    """Yield axes in nanoseconds with one row per name; `above`: empty height over the first, in rows."""
    row_px = 72 if len(names) == 1 else 48 if len(names) < 4 else 34
    with drawing(WIDTH, _TOP + (len(names) + above) * row_px + _BOTTOM, title) as picture:
        axes = picture.axes(_LEFT, _BOTTOM, _RIGHT, _TOP)
        axes.set(xlim=(start_ns, max(end_ns, start_ns + 1)), ylim=(len(names), -above))
        scale = kit.scale([0.0, (end_ns - start_ns) / 1e9])
        ticks = [start_ns + tick * 1e9 for tick in scale.ticks]
        axes.set_xticks(ticks, [kit.tidy(scale.show(tick)) for tick in scale.ticks], fontsize=LETTERS)
        axes.set_yticks([row + ROW / 2 for row in range(len(names))], names, fontsize=LETTERS, color=INK)
        axes.grid(axis="x")
        yield picture, axes


def shade_phases(picture: Drawing, axes: "Axes", spans: Iterable[tuple[str, float, float, str]]) -> None:
    """Shade phases given as (name, start, end, hover text); a name that fits stands above its phase."""
    low, high = axes.get_xlim()
    for index, (name, start, end, tip) in enumerate(spans):
        patch = axes.axvspan(start, end, color=INK, alpha=0.09 if index % 2 else 0.04, linewidth=0)
        picture.tip(patch, tip)
        width_px = (end - start) / (high - low) * axes.bbox.width
        if text_width(plain(name), LETTERS) + 8 <= width_px:
            axes.annotate(plain(name), (start, 1), (4, 5), xycoords=("data", "axes fraction"),
                          textcoords="offset points", fontsize=LETTERS, color=INK)  # fmt: skip


def column_shares(
    timeline: Timeline, stream: int, start_ns: int, end_ns: int, num_columns: int
) -> dict[str, "NDArray[np.float64]"]:
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


def _columns(picture: Drawing, axes: "Axes", timeline: Timeline, stream: int, row: int) -> None:
    import numpy as np

    start_ns, end_ns = axes.get_xlim()
    num_columns = (WIDTH - _LEFT - _RIGHT) // _COLUMN_PX
    edges = np.linspace(start_ns, end_ns, num_columns + 1)
    shares = column_shares(timeline, stream, int(start_ns), int(end_ns), num_columns)
    crowd = np.maximum(sum(shares.values()), 1.0)  # kernels of one stream that overlap: an odd trace
    filled = np.zeros(num_columns)
    stack = []
    for category, share in shares.items():
        filled = filled + share / crowd
        stack.append((category, filled))
    for category, top in reversed(stack):  # each from the row's floor, so that no gaps remain
        heights = row + ROW * (1 - np.round(top, 2))
        area = axes.stairs(heights, edges, baseline=row + ROW, fill=True, color=category_color(category), linewidth=0)
        picture.tip(area, f"{category}, {units.format_time(_time_s(timeline, stream, category))} of the step")


def _time_s(timeline: Timeline, stream: int, category: str) -> float:
    columns = zip(timeline.kernel, timeline.stream, timeline.duration_ns, strict=True)
    return sum(ns for kernel, on, ns in columns if on == stream and timeline.categories[kernel] == category) / 1e9
