from collections.abc import Sequence

from steplab import units
from steplab.records.run import Run
from steplab.report.kit.charts import color_number, series_color, series_legend
from steplab.report.kit.document import Bar, Bars, Segment
from steplab.report.kit.grouping import spread
from steplab.report.run.cells import RunCell, label, varying
from steplab.report.run.one_run import phase_names

_MOST_BARS = 40
_FIRST = 12
_SEEN = 0.98
"""Smallest share of a step that parts must cover to be drawn as the whole."""


def phases(cells: Sequence[RunCell]) -> Bars | None:
    chosen = _parted(cells)
    if not chosen:
        return None
    shown = spread(sorted(chosen, key=lambda c: c.run.median_s or 0), _MOST_BARS)
    shown = [cell for cell in chosen if cell in shown]
    note = f" {len(shown)} of {len(chosen)} runs, spread from the fastest to the slowest." if shown != chosen else ""
    names = list(dict.fromkeys(name for cell in shown for name in phase_names(cell.run)))
    fields = varying(chosen)
    several = len(shown) > 1
    bars = tuple(
        _bar(cell.run, names, label(cell, fields), detailed=several and cell.run.spec is not None) for cell in shown
    )
    note = f"Share of each part, by median time back to back; at the right, the median step.{note}"
    if any(_covered(cell.run) < _SEEN for cell in shown):
        note += " The empty part of a bar is time outside all parts."
    return Bars(bars=bars, legend=series_legend(names, "■"), note=note, full=1.0, first=_FIRST)


def _parted(cells: Sequence[RunCell]) -> list[RunCell]:
    """Cells with a bar: recorded loops with a phase, and steps with several.

    A training cell's bar replaces the bar of the same step without an optimizer.
    """
    trained = [cell for cell in cells if "optimizer" in phase_names(cell.run)]

    def worth_a_bar(cell: RunCell) -> bool:
        names = phase_names(cell.run)
        if cell.run.spec is None:
            return len(names) > 0
        return len(names) > 1 and ("optimizer" in names or not any(_covers(other, cell) for other in trained))

    return [cell for cell in cells if worth_a_bar(cell)]


def _covers(training: RunCell, cell: RunCell) -> bool:
    return all(value in (None, training.values[field]) for field, value in cell.values.items() if field != "pass")


def _covered(run: Run) -> float:
    if run.spec is not None or run.timing is None:
        return 1.0  # the medians may add up to more or less on a noisy machine
    totals = {samples.phase: sum(samples.best_s) for samples in run.timing.back_to_back}
    whole = totals.pop("step", 0.0)
    return min(sum(totals.values()) / whole, 1.0) if whole else 1.0


def _bar(run: Run, names: Sequence[str], name: str, *, detailed: bool) -> Bar:
    times = {phase: run.phase_s(phase) or 0.0 for phase in phase_names(run)}
    total, covered = sum(times.values()) or 1.0, _covered(run)
    shares = {phase: units.format_share(time_s / (run.median_s or total)) for phase, time_s in times.items()}
    segments = tuple(
        Segment(
            value=covered * time_s / total,
            color=color_number(series_color(names.index(phase))),
            tip=f"{phase}: {units.format_time(time_s)}, {shares[phase]} of the step",
        )
        for phase, time_s in times.items()
    )
    detail = ", ".join(f"{phase} {share}" for phase, share in shares.items()) if detailed else ""
    return Bar(label=name, figure=units.format_time(run.median_s or 0.0), segments=segments, detail=detail)
