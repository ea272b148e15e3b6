"""What a page says first: sentences computed from the runs, each naming the cells it speaks of."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from steplab import stats, units
from steplab.records.rows import Scalar, utilization
from steplab.report.cells import FIELDS, Cell, label, said, varying
from steplab.report.figures import never_steady, step_median, step_samples
from steplab.report.host_lead import waits_for_host
from steplab.report.memory.facts import memory_facts
from steplab.units import format_share

_MOST_NAMED = 6
_IDLE = 0.02  # a choice that moves no pair of cells by more is not told at length
_BASELINES = (
    ("precision", "fp32"),
    ("compile", "off"),
    ("attention", "plain"),
    ("checkpointing", "none"),
    ("optimizer", "adamw_loop"),
)
"""Fields whose values are compared, and the value the others are compared to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One sentence, and the figure that stands out of it."""

    figure: str
    """Short, shown large: '3.1x'."""
    text: str
    """The sentence."""
    wide: bool = False
    """Whether the sentence is long."""
    bad: bool = False
    """Whether it is about failures."""


def facts(cells: Sequence[Cell]) -> list[Fact]:
    """The headline of a page: extremes, what each choice gained, utilization, memory, failures."""
    fields = varying(cells)
    told = _extremes(cells, fields) + _best_utilization(cells, fields) + _largest_peak(cells, fields)
    memory = [Fact(figure=fact.figure, text=fact.text, wide=True) for fact in memory_facts(cells, fields)]
    return told + _gains(cells, fields) + _waiting(cells, fields) + memory + _failures(cells, fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two cells that differ in one field."""

    ratio: float
    """Time before over time after: above 1 is faster."""
    before: Cell
    """The cell with the baseline's value."""
    after: Cell
    """The other."""
    before_s: float
    """Median step time."""
    after_s: float
    """Median step time."""


def _extremes(cells: Sequence[Cell], fields: Sequence[str]) -> list[Fact]:
    timed = sorted((c for c in cells if step_median(c.run)), key=lambda c: step_median(c.run) or 0)
    if not timed:
        return []
    if len(timed) == 1:
        return [_timed("Median step time", timed[0], fields)]
    if len({_family(cell) for cell in timed}) > 1:
        return []  # which of two unlike things is faster is not a finding
    return [_timed("Fastest step", timed[0], fields), _timed("Slowest step", timed[-1], fields)]


def _family(cell: Cell) -> tuple[str, str]:
    """What makes step times comparable: the sizes of one architecture, or one and the same code of somebody else's."""
    model = cell.run.spec.model if cell.run.spec else None
    if model is None:
        return ("loop", cell.run.name)
    if model.kind == "hf":
        return ("hf", str((model.hf_config or {}).get("model_type")))
    return (model.kind, model.name if model.kind == "factory" else "")


def _timed(what: str, cell: Cell, fields: Sequence[str]) -> Fact:
    summary = stats.summarize(step_samples(cell.run))
    low, high = units.format_time(summary.low), units.format_time(summary.high)
    return Fact(
        figure=units.format_time(summary.median),
        text=f"{what}: {label(cell, fields)} (95 % interval {low} to {high}, n = {summary.count}).",
    )


def _gains(cells: Sequence[Cell], fields: Sequence[str]) -> list[Fact]:
    """What each choice gained over its baseline, and in one sentence those that gained next to nothing."""
    told: list[Fact] = []
    idle: list[str] = []
    for field, baseline in _BASELINES:
        present = list(dict.fromkeys(c.values[field] for c in cells if c.values[field] is not None))
        base = baseline if baseline in present else present[0] if present else None
        for value in present:
            pairs = [] if value == base else _pairs(cells, field, base, value)
            if not pairs:
                continue
            choice = f"{said(field, value)} instead of {said(field, base)}"
            if all(abs(pair.ratio - 1) < _IDLE for pair in pairs):
                idle.append(choice)
            else:
                told.append(_gain(pairs, choice, [name for name in fields if name != field]))
    if idle:
        text = f"Less than {_IDLE:.0%} either way in every pair of cells alike in all else: {'; '.join(idle)}."
        told.append(Fact(figure="≈ 1×", text=text.replace("%", " %"), wide=True))
    return told


def _pairs(cells: Sequence[Cell], field: str, base: Scalar, value: Scalar) -> list[Pair]:
    """Cells that differ in one field alone, its baseline and the other value; least gain first."""

    def rest(cell: Cell) -> tuple[Scalar, ...]:
        return tuple(cell.values[name] for name in FIELDS if name != field)

    timed = [(cell, time_s) for cell in cells if (time_s := step_median(cell.run))]
    before = {rest(cell): (cell, time_s) for cell, time_s in timed if cell.values[field] == base}
    after = [(cell, time_s) for cell, time_s in timed if cell.values[field] == value and rest(cell) in before]
    pairs = []
    for cell, after_s in after:
        slow, before_s = before[rest(cell)]
        pairs.append(Pair(ratio=before_s / after_s, before=slow, after=cell, before_s=before_s, after_s=after_s))
    return sorted(pairs, key=lambda pair: pair.ratio)


def _gain(pairs: Sequence[Pair], choice: str, others: Sequence[str]) -> Fact:
    middle = median(pair.ratio for pair in pairs)
    least, most = pairs[0], pairs[-1]
    times = f"{units.format_time(most.before_s)} to {units.format_time(most.after_s)}"
    unsure = sum(1 for pair in pairs if _overlap(pair.before, pair.after))
    restless = sum(1 for pair in pairs if never_steady(pair.before.run) or never_steady(pair.after.run))
    if len(pairs) == 1:
        text = f"{choice}: {_speed(middle)} at {label(most.before, others)} ({times})."
        text += " The intervals overlap." if unsure else ""
        text += " The step times were not steady." if restless else ""
    else:
        text = (
            f"{choice}: {_speed(middle)} in the median of {len(pairs)} pairs of cells alike in all else; "
            f"most, {_times(most.ratio)}, at {label(most.before, others)} ({times}); "
            f"least, {_times(least.ratio)}, at {label(least.before, others)}."
        )
        text += f" In {unsure} of {len(pairs)} the intervals overlap." if unsure else ""
        text += f" In {restless} of {len(pairs)} the step times were not steady." if restless else ""
    return Fact(figure=_times(middle), text=text, wide=True)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"


def _speed(ratio: float) -> str:
    return f"{_times(ratio)} as fast" if ratio >= 1 else f"{_times(1 / ratio)} as slow"


def _overlap(one: Cell, other: Cell) -> bool:
    a, b = stats.summarize(step_samples(one.run)), stats.summarize(step_samples(other.run))
    return a.low <= b.high and b.low <= a.high


def _best_utilization(cells: Sequence[Cell], fields: Sequence[str]) -> list[Fact]:
    known = [(u.value, u, c) for c in cells if (u := utilization(c.run, "mfu", "causal")) and u.value is not None]
    if not known:
        return []
    value, used, cell = max(known, key=lambda item: item[0])
    peak = units.format_rate(used.peak_flops_per_s or 0, "FLOP/s")
    text = f"Highest MFU: {label(cell, fields)} ({used.convention}, of a dense {used.dtype} peak of {peak})."
    return [Fact(figure=format_share(value), text=text)]


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


def _waiting(cells: Sequence[Cell], fields: Sequence[str]) -> list[Fact]:
    """Cells whose device waits for Python: their times are in part the host's, and faster kernels would gain less."""
    late = [c for c in cells if c.run.timing and waits_for_host(c.run.timing.back_to_back)]
    if not late:
        return []
    names = "; ".join(label(cell, fields) for cell in late[:_MOST_NAMED])
    more = f"; and {len(late) - _MOST_NAMED} more" if len(late) > _MOST_NAMED else ""
    text = f"Steps in which Python was hardly ahead of the device, which waits for it: {names}{more}."
    return [Fact(figure=f"{len(late)} of {len(cells)}", text=text, wide=True)]


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
            Fact(
                figure=f"{len(alike)} of {len(cells)}",
                text=f"{who} {words}: {names}{more}.",
                wide=True,
                bad=True,
            )
        )
    return told
