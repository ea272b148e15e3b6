"""Plots warm-up: every step's time, in one small panel per run."""

from collections.abc import Sequence

from steplab import stats, units
from steplab.records.run import Run
from steplab.records.timing import curve, find_phase
from steplab.report.kit import charts as kit
from steplab.report.kit.charts import DOTTED, MUTED, PAPER, SERIES, Drawing, drawing
from steplab.report.kit.document import Chart
from steplab.report.kit.grouping import spread
from steplab.report.run.cells import RunCell, label, varying
from steplab.report.run.one_run import steady_words

MOST_CURVES = 12
_WIDTH, _HEIGHT = 300, 150


def worth_a_curve(cells: Sequence[RunCell]) -> list[RunCell]:
    """Choose at most MOST_CURVES timed runs: those that never settle, and others from fastest to slowest."""
    timed = [cell for cell in cells if cell.run.timing and len(curve(cell.run.timing)) > 1]
    timed.sort(key=lambda cell: cell.run.median_s or 0)
    restless = [cell for cell in timed if not _settles(cell.run)]
    first = spread(restless, MOST_CURVES // 2) if len(timed) > MOST_CURVES else restless
    others = [cell for cell in timed if _settles(cell.run)]
    chosen = {cell.run.id for cell in first + spread(others, max(MOST_CURVES - len(first), 2))}
    return [cell for cell in cells if cell.run.id in chosen]


def steady_step(run: Run) -> int | None:
    """Number (from 1) of the first step at steady speed; None if it never settles or there are too few steps."""
    first = stats.steady_from(curve(run.timing)) if run.timing else None
    return None if first is None else first + 1


def _settles(run: Run) -> bool:
    return steady_step(run) is not None


def warmup_curves(cells: Sequence[RunCell]) -> Chart | None:
    chosen = worth_a_curve(cells)
    if not chosen:
        return None
    fields = varying(cells)
    pictures = []
    for cell in chosen:
        name = label(cell, fields)
        assert cell.run.timing is not None  # chosen for its curve
        samples = curve(cell.run.timing)
        with drawing(_WIDTH, _HEIGHT, f"warm-up curve, {name}") as picture:
            _curve(picture, cell.run)
            alarming = len(samples) >= stats.FEWEST_FOR_STEADY and not _settles(cell.run)
            pictures.append(picture.picture(name, subtitle=steady_words(samples), alarming=alarming))
    timed = sum(1 for cell in cells if cell.run.timing)
    note = "Time of each step from the first on. Hollow steps are warm-up, full ones are measured; the level "
    note += "line is the median of the measured ones, the dotted line where the step time becomes steady."
    if len(chosen) < timed:
        note += f" {len(chosen)} of {timed} runs: those that never settle, the rest from fastest to slowest."
    return Chart(pictures=tuple(pictures), note=note)


def _curve(picture: Drawing, run: Run) -> None:
    assert run.timing is not None  # chosen for its curve
    samples = curve(run.timing)
    warmup = find_phase(run.timing.warmup, "step")
    num_warmup = len(warmup.best_s) if warmup else 0
    scale = kit.scale(samples, log_from=4)
    axes = picture.axes(56, 26, 8, 6)
    scale.put_on(axes)
    axes.grid(axis="y")
    numbers = range(1, len(samples) + 1)
    axes.set_xlim(0.4, len(samples) + 0.6)
    apart = max(len(samples) // 5, 1)
    axes.set_xticks([1, *range(apart if apart > 1 else 2, len(samples) + 1, apart)])
    axes.tick_params(axis="x", labelsize=11)
    settled = run.median_s
    if settled is not None:
        axes.axhline(settled, color=SERIES[0], linewidth=1, alpha=0.5)
    steady = steady_step(run)
    if steady is not None:
        axes.axvline(steady - 0.5, color=MUTED, linewidth=1, linestyle=DOTTED)
    axes.plot(numbers, samples, color=SERIES[0], linewidth=1, alpha=0.55)
    for number, sample in zip(numbers, samples, strict=True):
        fill = PAPER if number <= num_warmup else SERIES[0]
        size = 6 if len(samples) <= 40 else 3
        (mark,) = axes.plot([number], [sample], "o", color=SERIES[0], markerfacecolor=fill, markersize=size)
        kind = "warm-up" if number <= num_warmup else "measured"
        picture.tip(mark, f"step {number}, {kind}: {units.format_time(sample)}")
