"""Bar charts of a profile: the device's time, its categories, and the kernels with the most time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.profile import CATEGORIES, Profile
from steplab.records.run import Run
from steplab.report.kit.charts import INK, MUTED, PAPER, SERIES, Drawing, category_color, category_legend, drawing
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.kernel_names import short_kernel
from steplab.report.profile import words
from steplab.report.profile.figures import Span, TopKernel, passes, shown_categories, spans, top_kernels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 880
_ROW = 30
_LABELLED = 0.055  # a segment of at least this share has room for its figure
_TOP = 8
_KERNEL_WIDTH, _KERNEL_ROW = 500, 36
BUSY, WAITS, IDLE = SERIES[0], SERIES[1], SERIES[6]


def device_time(run: Run, profile: Profile) -> Chart:
    """Busy, waiting and idle time of each phase, and the unprofiled time that the busy time should agree with."""
    rows = spans(run, profile)
    device = words.device_word(profile)
    parts = [("busy", BUSY, [s.busy_s for s in rows]), ("waits for the host", WAITS, [s.host_bound_s for s in rows])]
    parts = parts if words.has_host(profile) else parts[:1]
    parts.append(("idle", IDLE, [s.idle_s for s in rows]))
    longest = max([s.window_s for s in rows] + [s.timed_s or 0.0 for s in rows]) or 1.0
    with drawing(_WIDTH, 16 + _ROW * len(rows), f"time of the {device} per step, by phase") as picture:
        axes = _bars_frame(picture, [s.phase for s in rows], right=96)
        axes.set_xlim(0, 1.01 * longest)
        for index, span in enumerate(rows):
            start = 0.0
            for name, color, values in parts:
                (bar,) = axes.barh(index, values[index], 0.66, start, color=color)
                share = units.format_percent(values[index] / span.window_s if span.window_s else 0.0)
                picture.tip(bar, f"{span.phase}: {name} {units.format_time(values[index])}, {share} of the window")
                start += values[index]
            if span.timed_s is not None:
                (mark,) = axes.plot([span.timed_s] * 2, [index - 0.42, index + 0.42], color=INK, linewidth=2.5)
                picture.tip(mark, f"{span.phase}, unprofiled: {units.format_time(span.timed_s)}")
            _at_right(axes, index, units.format_time(span.window_s))
    legend = tuple((SERIES.index(color) + 1, "■", name) for name, color, _ in parts)
    note = f"Time of the {device} per step under the profiler; at the right, the total."
    if any(span.timed_s is not None for span in rows):
        note += " The vertical line is the unprofiled median of the same phase, which the busy time should reach."
    return Chart(pictures=(Picture(title="", svg=picture.to_svg(), width=_WIDTH),), legend=legend, note=note)


def category_bars(run: Run, profile: Profile) -> Chart | None:
    """Busy time of forward, forward + backward and train by category, one bar each; None where nothing ran."""
    rows = passes(run, profile)
    if not rows:
        return None
    shown = shown_categories(profile)
    with drawing(_WIDTH, 16 + _ROW * len(rows), "categories of kernels, as shares of the busy time") as picture:
        axes = _bars_frame(picture, [name for name, _ in rows], right=96)
        axes.set_xlim(0, 1)
        for index, (name, span) in enumerate(rows):
            _category_bar(picture, axes, index, name, span)
            _at_right(axes, index, units.format_time(span.busy_s))
    note = "Share of the busy time by category; at the right, the busy time per step."
    picture_ = Picture(title="", svg=picture.to_svg(), width=_WIDTH)
    return Chart(pictures=(picture_,), legend=category_legend(shown), note=note)


def _category_bar(picture: Drawing, axes: "Axes", index: int, name: str, span: Span) -> None:
    start = 0.0
    for category, seconds in span.categories.items():
        share = seconds / span.busy_s if span.busy_s else 0.0
        if not share:
            continue
        (bar,) = axes.barh(index, share, 0.72, start, color=category_color(category))
        tip = f"{name}: {category} {units.format_time(seconds)}, {units.format_percent(share)} of the busy time"
        picture.tip(bar, tip)
        if share >= _LABELLED:
            axes.text(start + share / 2, index, f"{100 * share:.0f} %", ha="center", va="center", color=PAPER,
                      fontsize=11)  # fmt: skip
        start += share


def _bars_frame(picture: Drawing, labels: Sequence[str], right: float) -> "Axes":
    """Axes for horizontal bars, one under the other, with their names at the left and room at the right."""
    axes = picture.axes(min(18 + 6.8 * max(map(len, labels), default=0), 260), 6, right, 6)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels, fontsize=12, color=INK)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return axes


def _at_right(axes: "Axes", index: int, text: str) -> None:
    row = axes.get_yaxis_transform()
    axes.text(1.012, index, text, ha="left", va="center", fontsize=12, color=INK, transform=row)


def kernel_bars(profile: Profile) -> Chart | None:
    """The kernels with the most time, by phase."""
    pictures = []
    shown: set[str] = set()
    for phase in profile.phases:
        kernels = top_kernels(profile, (phase.phase,))
        if not kernels:
            continue
        shown |= {kernel.category for kernel in kernels[:_TOP]}
        rest = sum(kernel.share for kernel in kernels[_TOP:])
        subtitle = f"{units.format_percent(rest)} of the time in {len(kernels) - _TOP} more" if rest else ""
        svg = _kernel_picture(profile, phase.phase, kernels[:_TOP])
        pictures.append(Picture(title=phase.phase, svg=svg, width=_KERNEL_WIDTH, subtitle=subtitle))
    if not pictures:
        return None
    word = words.kernels_word(profile)
    note = f"Time per step, share of the time of the phase's {word}, and calls per step, each summed over all the "
    note += "places of the model in which it ran."
    order = [category for category in CATEGORIES if category in shown]
    return Chart(pictures=tuple(pictures), legend=category_legend(order), note=note)


def _kernel_picture(profile: Profile, phase: str, kernels: Sequence[TopKernel]) -> str:
    title = f"{words.kernels_word(profile)} that take most of {phase}"
    longest = max(kernel.time_s for kernel in kernels) or 1.0
    with drawing(_KERNEL_WIDTH, 4 + _KERNEL_ROW * len(kernels), title) as picture:
        axes = picture.axes(2, 2, 176, 2)
        axes.set_xlim(0, longest)
        axes.set_ylim(len(kernels) - 0.5, -0.5)
        axes.set_axis_off()
        for index, kernel in enumerate(kernels):
            (bar,) = axes.barh(index + 0.22, kernel.time_s, 0.3, color=category_color(kernel.category))
            where = ", ".join(filter(None, kernel.ranges[:3])) or "no range"
            picture.tip(bar, f"{short_kernel(kernel.name, 160)}; {kernel.category}; {where}")
            axes.text(0, index - 0.06, kernel.short, va="bottom", fontsize=11, color=INK)
            figures = f"{units.format_time(kernel.time_s)} · {units.format_percent(kernel.share)}"
            transform = axes.get_yaxis_transform()
            axes.text(1.03, index + 0.22, figures, va="center", fontsize=11, color=INK, transform=transform)
            calls = f"{words.calls_text(kernel.calls)} ×"
            axes.text(1.0 + 174 / 322, index + 0.22, calls, ha="right", va="center", fontsize=11, color=MUTED,
                      transform=transform)  # fmt: skip
    return picture.to_svg()
