"""What a page says first: sentences computed from the runs, each naming the cells it speaks of."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from steplab import stats, units
from steplab.records.rows import Scalar, utilization
from steplab.report.cells import FIELDS, Cell, label, said, varying
from steplab.report.figures import step_median, step_samples

_MOST_NAMED = 6
_BASELINES = (("precision", "fp32"), ("compile", "off"), ("attention", "plain"), ("optimizer", "adamw_loop"))
"""Fields whose values are compared, and the value the others are compared to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One sentence, and the figure that stands out of it."""

    figure: str
    """Short, shown large: '3.1x'."""
    text: str
    """The sentence."""
    bad: bool = False
    """Whether it is about failures."""


def facts(cells: Sequence[Cell]) -> list[Fact]:
    """The headline of a page: extremes, what each choice gained, utilization, memory, failures."""
    fields = varying(cells)
    told = [*_extremes(cells, fields)]
    for field, baseline in _BASELINES:
        told += _gains(cells, fields, field, baseline)
    told += _best_utilization(cells, fields)
    told += _largest_peak(cells, fields)
    return told + _failures(cells, fields)


def _extremes(cells: Sequence[Cell], fields: Sequence[str]) -> list[Fact]:
    timed = sorted((c for c in cells if step_median(c.run)), key=lambda c: step_median(c.run) or 0)
    if not timed:
        return []
    if len(timed) == 1:
        return [_timed("Median step time", timed[0], fields)]
    return [_timed("Fastest step", timed[0], fields), _timed("Slowest step", timed[-1], fields)]


def _timed(what: str, cell: Cell, fields: Sequence[str]) -> Fact:
    summary = stats.summarize(step_samples(cell.run))
    low, high = units.format_time(summary.low), units.format_time(summary.high)
    return Fact(
        figure=units.format_time(summary.median),
        text=f"{what}: {label(cell, fields)} (95 % interval {low} to {high}, n = {summary.count}).",
    )


def _gains(cells: Sequence[Cell], fields: Sequence[str], field: str, baseline: str) -> list[Fact]:
    """A fact for each other value of `field` that has cells alike in everything else with the baseline's value."""
    present = list(dict.fromkeys(cell.values[field] for cell in cells if cell.values[field] is not None))
    base = baseline if baseline in present else present[0] if present else None
    return [fact for value in present if value != base for fact in _gain(cells, fields, field, base, value)]


def _gain(
    cells: Sequence[Cell], fields: Sequence[str], field: str, base: Scalar, value: Scalar
) -> list[Fact]:
    def rest(cell: Cell) -> tuple[Scalar, ...]:
        return tuple(cell.values[name] for name in FIELDS if name != field)

    before = {rest(cell): cell for cell in cells if cell.values[field] == base and step_median(cell.run)}
    pairs = [(before[rest(c)], c) for c in cells if c.values[field] == value and rest(c) in before]
    ratios = [((step_median(a.run) or 0) / t, a, b) for a, b in pairs if (t := step_median(b.run))]
    if not ratios:
        return []
    ratios.sort(key=lambda item: item[0])
    others = [name for name in fields if name != field]
    (least, *_, least_cell), (most, slow, fast) = ratios[0], ratios[-1]
    times = (
        f"{units.format_time(step_median(slow.run) or 0)} to {units.format_time(step_median(fast.run) or 0)}"
    )
    middle = median(ratio for ratio, *_ in ratios)
    choice = f"{said(field, value)} instead of {said(field, base)}"
    if len(ratios) == 1:
        text = f"{choice}: {_speed(middle)} at {label(slow, others)} ({times})."
    else:
        text = (
            f"{choice}: {_speed(middle)} in the median of {len(ratios)} pairs of cells alike in all else; "
            f"most, {_times(most)}, at {label(slow, others)} ({times}); "
            f"least, {_times(least)}, at {label(least_cell, others)}."
        )
    unsure = sum(1 for _, a, b in ratios if _overlap(a, b))
    if unsure:
        text += (
            f" In {unsure} of {len(ratios)} the intervals overlap."
            if len(ratios) > 1
            else " The intervals overlap."
        )
    return [Fact(figure=_times(middle), text=text)]


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"


def _speed(ratio: float) -> str:
    return f"{_times(ratio)} as fast" if ratio >= 1 else f"{_times(1 / ratio)} as slow"


def _overlap(one: Cell, other: Cell) -> bool:
    a, b = stats.summarize(step_samples(one.run)), stats.summarize(step_samples(other.run))
    return a.low <= b.high and b.low <= a.high


def _best_utilization(cells: Sequence[Cell], fields: Sequence[str]) -> list[Fact]:
    known = [
        (u.value, u, c) for c in cells if (u := utilization(c.run, "mfu", "causal")) and u.value is not None
    ]
    if not known:
        return []
    value, used, cell = max(known, key=lambda item: item[0])
    peak = units.format_rate(used.peak_flops_per_s or 0, "FLOP/s")
    text = f"Highest MFU: {label(cell, fields)} ({used.convention}, of a dense {used.dtype} peak of {peak})."
    return [Fact(figure=units.format_percent(value), text=text)]


def _largest_peak(cells: Sequence[Cell], fields: Sequence[str]) -> list[Fact]:
    peaks = [(p.peak_allocated_bytes, c) for c in cells if c.run.memory and (p := c.run.memory.peak("step"))]
    if not peaks:
        return []
    size, cell = max(peaks, key=lambda item: item[0])
    total = cell.run.memory.total_bytes if cell.run.memory else None
    of_total = f", of {units.format_bytes(total)} on the device" if total else ""
    return [
        Fact(
            figure=units.format_bytes(size),
            text=f"Largest peak of allocated memory: {label(cell, fields)}{of_total}.",
        )
    ]


def _failures(cells: Sequence[Cell], fields: Sequence[str]) -> list[Fact]:
    told = []
    failed = [cell for cell in cells if cell.run.failure]
    for kind in dict.fromkeys(cell.run.status for cell in failed):
        alike = [cell for cell in failed if cell.run.status == kind]
        names = "; ".join(label(cell, fields) for cell in alike[:_MOST_NAMED])
        more = f"; and {len(alike) - _MOST_NAMED} more" if len(alike) > _MOST_NAMED else ""
        words = {"out_of_memory": "ran out of memory", "timeout": "ran out of time"}.get(kind, "failed")
        who = "cell" if len(alike) == 1 else "cells"
        told.append(
            Fact(figure=f"{len(alike)} of {len(cells)}", text=f"{who} {words}: {names}{more}.", bad=True)
        )
    return told
