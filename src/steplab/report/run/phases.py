"""The parts of each step on a page: one bar per run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from steplab import units
from steplab.records.rows import Scalar
from steplab.records.run import Run
from steplab.report.kit.charts import INK, PAPER, SERIES, Drawing, drawing
from steplab.report.kit.document import Chart, Picture
from steplab.report.kit.labels import LINE, fit_all, text_width, wrap
from steplab.report.run.cells import RunCell, label, varying
from steplab.report.run.figures import phase_median, phase_names, spread, step_median
from steplab.units import format_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BARS = 40
_WIDTH, _ROW_PX = 880, 24
_NAME_PX, _NAME_SIZE, _MOST_LINES = 330, 12, 4  # of the names beside the bars
_SEEN = 0.98  # a bar that covers less of its step visibly leaves something empty


def phases(cells: Sequence[RunCell]) -> Chart | None:
    """The parts of a step as shares of their sum, one bar per run."""
    chosen = _parted(cells)
    if not chosen:
        return None
    shown = spread(sorted(chosen, key=lambda c: step_median(c.run) or 0), _MOST_BARS)
    shown = [cell for cell in chosen if cell in shown]
    fields = varying(chosen)
    names = list(dict.fromkeys(name for cell in shown for name in phase_names(cell.run)))
    labels = [label(cell, fields) for cell in shown]
    texts = fit_all(labels, lambda text, _: "\n".join(wrap(text, _NAME_PX, _NAME_SIZE, _MOST_LINES)))
    left = 12 + max(text_width(line, _NAME_SIZE) for text in texts for line in text.split("\n"))
    heights = [_ROW_PX + text.count("\n") * LINE * _NAME_SIZE for text in texts]
    centers = [sum(heights[:index]) + height / 2 for index, height in enumerate(heights)]
    with drawing(_WIDTH, 16 + sum(heights), "parts of a step") as picture:
        axes = picture.axes(left, 8, 84, 8)
        axes.set_xlim(0, 1)
        axes.set_ylim(sum(heights), 0)
        axes.set_yticks(centers, texts, fontsize=_NAME_SIZE, color=INK)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        for text, name in zip(axes.get_yticklabels(), labels, strict=True):
            text.set(linespacing=LINE, va="center")
            if text.get_text() != name:
                picture.tip(text, name)
        for center, cell in zip(centers, shown, strict=True):
            _phase_bar(picture, axes, center, cell.run, names)
    legend = tuple((i % len(SERIES) + 1, "■", name) for i, name in enumerate(names))
    note = "Share of each part, by median time back to back; at the right, the median step."
    if any(_covered(cell.run) < _SEEN for cell in shown):
        note += " The empty part of a bar is time outside all parts."
    if len(shown) < len(chosen):
        note += f" {len(shown)} of {len(chosen)} runs, spread from the fastest to the slowest."
    return Chart(pictures=(Picture(title="", svg=picture.to_svg(), width=_WIDTH),), legend=legend, note=note)


def _parted(cells: Sequence[RunCell]) -> list[RunCell]:
    """The runs that get a bar: recorded loops with any parts, and steps with several.

    A forward_backward cell adds nothing to its training cell.
    """
    trained = {_but_for_the_pass(cell) for cell in cells if "optimizer" in phase_names(cell.run)}

    def worth_a_bar(cell: RunCell) -> bool:
        names = phase_names(cell.run)
        if cell.run.spec is None:
            return len(names) > 0
        return len(names) > 1 and ("optimizer" in names or _but_for_the_pass(cell) not in trained)

    return [cell for cell in cells if worth_a_bar(cell)]


def _but_for_the_pass(cell: RunCell) -> tuple[Scalar, ...]:
    return tuple(value for field, value in cell.values.items() if field not in ("pass", "optimizer"))


def _covered(run: Run) -> float:
    """Share of the step's time inside its parts: 1, except in a loop that marks only some parts."""
    if run.spec is not None or run.timing is None:
        return 1.0  # the medians may add up to more or less on a noisy machine
    totals = {samples.phase: sum(samples.best_s) for samples in run.timing.back_to_back}
    whole = totals.pop("step", 0.0)
    return min(sum(totals.values()) / whole, 1.0) if whole else 1.0


def _phase_bar(picture: Drawing, axes: "Axes", center: float, run: Run, names: Sequence[str]) -> None:
    times = {name: phase_median(run, name) or 0.0 for name in phase_names(run)}
    start, total, covered = 0.0, sum(times.values()) or 1.0, _covered(run)
    whole_name = "its parts' sum" if covered == 1 else "the step"
    for name, time_s in times.items():
        share = covered * time_s / total
        (bar,) = axes.barh(center, share, 0.72 * _ROW_PX, start, color=SERIES[names.index(name) % len(SERIES)])
        picture.tip(bar, f"{name}: {units.format_time(time_s)}, {format_share(share)} of {whole_name}")
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
