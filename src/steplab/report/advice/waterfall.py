"""Draws a search as a waterfall: the first step, each change's saving, and the fastest step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.advice import Advice, Tried
from steplab.report.kit.charts import BAD, INK, MUTED, SERIES, Drawing, drawing, tidy, time_scale
from steplab.report.kit.document import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _ROW, _LEFT, _RIGHT, _TOP, _BELOW = 640, 30, 210, 90, 8, 36


def waterfall(advice: Advice) -> Chart | None:
    """None with fewer than two timed steps."""
    timed = [tried for tried in advice.tried if tried.ratio]
    if advice.start_s is None or advice.best_s is None or not timed:
        return None
    rows = len(timed) + 2
    height = _TOP + rows * _ROW + _BELOW
    scale = time_scale([advice.start_s, *(tried.ratio.a for tried in timed if tried.ratio)], log_from=float("inf"))
    with drawing(_WIDTH, height, "saved by each change") as picture:
        axes = picture.axes(_LEFT, _BELOW, _RIGHT, _TOP)
        axes.set_xlim(0, scale.high)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_xticks(scale.ticks, [tidy(scale.show(tick)) for tick in scale.ticks], fontsize=11)
        labels = ["the step as given", *(tried.words for tried in timed), "the fastest step"]
        axes.set_yticks(range(rows), labels, fontsize=11, color=INK)
        axes.grid(axis="x")

        for row, seconds in ((0, advice.start_s), (rows - 1, advice.best_s)):
            told = f"{labels[row]}: {units.format_time(seconds)}"
            _bar(picture, axes, _Bar(row, 0, seconds), MUTED, told)
            _figure(axes, seconds, row, units.format_time(seconds), INK)
        for row, tried in enumerate(timed, start=1):
            _change(picture, axes, row, tried)
    legend = ((1, "■", "measured, kept"), (2, "■", "measured, not kept"), (3, "■", "predicted"))
    note = (
        "A bar reaches from the step time before a change to that with it, both as measured in turns; to the right of "
        "where it begins the change costs time. The thin bar is what was predicted."
    )
    return Chart(pictures=(picture.picture(),), legend=legend, note=note)


@dataclass(frozen=True, slots=True)
class _Bar:
    row: float
    start_s: float
    end_s: float
    thick: float = 0.6


def _bar(picture: Drawing, axes: "Axes", bar: _Bar, color: str, tip: str) -> None:
    left, width = min(bar.start_s, bar.end_s), abs(bar.end_s - bar.start_s)
    (patch,) = axes.barh([bar.row], [width], left=[left], height=bar.thick, color=color)
    picture.tip(patch, tip)


def _change(picture: Drawing, axes: "Axes", row: int, tried: Tried) -> None:
    ratio = tried.ratio
    assert ratio is not None
    after_s = ratio.a * ratio.ratio
    saved_s = ratio.a - after_s
    told = f"{tried.words}: {units.format_time(ratio.a)} became {units.format_time(after_s)}"
    _bar(picture, axes, _Bar(row - 0.1, ratio.a, after_s), SERIES[0] if tried.kept else SERIES[1], told)
    if tried.predicted_share is not None:
        predicted_s = max(ratio.a * (1 - tried.predicted_share), 0.0)
        told = f"{tried.words}: predicted to become {units.format_time(predicted_s)}"
        _bar(picture, axes, _Bar(row + 0.3, ratio.a, predicted_s, thick=0.14), SERIES[2], told)
    _figure(axes, max(ratio.a, after_s), row, units.signed(-saved_s, units.format_time), INK if saved_s > 0 else BAD)


def _figure(axes: "Axes", x: float, row: int, text: str, color: str) -> None:
    axes.annotate(text, (x, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=11, color=color)
