"""The sentences at the top of a page, computed from the runs; each names the cells that it concerns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from steplab import stats, units
from steplab.records.disturbances import disturbances, never_settles
from steplab.records.rows import Scalar
from steplab.records.run_figures import utilization
from steplab.records.timing import HARDLY_AHEAD, waits_for_host
from steplab.report.kit.document import Fact
from steplab.report.run.cells import COMPARED, RunCell, label, said, varying
from steplab.report.run.figures import step_median, step_samples
from steplab.report.run.words import interval_words
from steplab.specs.step import STEP_FIELDS
from steplab.units import format_share

_MOST_NAMED = 6
_NEGLIGIBLE = 0.02  # choices that change the step time of no pair of cells by more share one sentence
_BASELINES = tuple((field.column, field.about.baseline) for field in STEP_FIELDS if field.about.baseline is not None)
"""The fields whose values are compared, each with its baseline."""


def facts(cells: Sequence[RunCell], of_memory: Iterable[Fact] = ()) -> list[Fact]:
    """The summary of a page: fastest and slowest step, utilization, gains of each choice, watched memory,
    failures."""
    fields = varying(cells)
    first = _extremes(cells, fields) + _best_utilization(cells, fields) + _largest_peak(cells, fields)
    return first + _gains(cells, fields) + _waiting(cells, fields) + [*of_memory] + _failures(cells, fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two cells that differ in one field only."""

    ratio: float
    """Time before divided by time after; above 1, the step became faster."""
    before: RunCell
    """The cell with the baseline's value."""
    after: RunCell
    """The other."""
    before_s: float
    """Median step time of `before`, in seconds."""
    after_s: float
    """Median step time of `after`, in seconds."""


def _extremes(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
    timed = sorted((c for c in cells if step_median(c.run)), key=lambda c: step_median(c.run) or 0)
    if not timed:
        return []
    if len(timed) == 1:
        return [_timed("Median step time", timed[0], fields)]
    if len({_family(cell) for cell in timed}) > 1:
        return []  # the step times of unlike models are not comparable
    return [_timed("Fastest step", timed[0], fields), _timed("Slowest step", timed[-1], fields)]


def _family(cell: RunCell) -> tuple[str, str]:
    """Cells with equal families have comparable step times: sizes of one architecture, or the same code of a user."""
    model = cell.run.spec.model if cell.run.spec else None
    if model is None:
        return ("loop", cell.run.name)
    if model.kind == "hf":
        return ("hf", str((model.hf_config or {}).get("model_type")))
    return (model.kind, model.name if model.kind == "factory" else "")


def _timed(what: str, cell: RunCell, fields: Sequence[str]) -> Fact:
    summary = stats.summarize(step_samples(cell.run))
    warnings = "".join(f" Warning: {disturbance.text}" for disturbance in disturbances(cell.run))
    return Fact(
        figure=units.format_time(summary.median),
        text=f"{what}: {label(cell, fields)} ({interval_words(summary)}).{warnings}",
        bad=bool(warnings),
    )


def _gains(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
    """The gain of each choice over its baseline; choices with a negligible effect share one sentence."""
    gains: list[Fact] = []
    negligible: list[str] = []
    for field, baseline in _BASELINES:
        present = list(dict.fromkeys(c.values[field] for c in cells if c.values[field] is not None))
        base = baseline if baseline in present else present[0] if present else None
        for value in present:
            pairs = [] if value == base else _pairs(cells, field, base, value)
            if not pairs:
                continue
            choice = f"{said(field, value)} instead of {said(field, base)}"
            if all(abs(pair.ratio - 1) < _NEGLIGIBLE for pair in pairs):
                negligible.append(choice)
            else:
                gains.append(_gain(pairs, choice, [name for name in fields if name != field]))
    if negligible:
        share = f"{_NEGLIGIBLE:.0%}".replace("%", " %")
        text = f"Step time changes by less than {share} in every pair of cells that differ in one of these choices only"
        gains.append(Fact(figure="≈ 1×", text=f"{text}: {'; '.join(negligible)}.", wide=True))
    return gains


def _pairs(cells: Sequence[RunCell], field: str, base: Scalar, value: Scalar) -> list[Pair]:
    """Pairs of cells that differ in one field alone, from the value `base` to `value`; smallest gain first."""

    def rest(cell: RunCell) -> tuple[Scalar, ...]:
        return tuple(cell.values[name] for name in COMPARED if name != field)

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
    restless = sum(1 for pair in pairs if never_settles(pair.before.run) or never_settles(pair.after.run))
    if len(pairs) == 1:
        text = f"{choice}: {_speed(middle)} at {label(most.before, others)} ({times})."
        text += " The intervals overlap." if unsure else ""
        text += " The step time did not settle." if restless else ""
    else:
        text = (
            f"{choice}: {_speed(middle)} in the median of {len(pairs)} pairs of cells that differ in nothing else; "
            f"largest gain, {_times(most.ratio)}, at {label(most.before, others)} ({times}); "
            f"smallest, {_times(least.ratio)}, at {label(least.before, others)}."
        )
        text += f" In {unsure} of {len(pairs)} the intervals overlap." if unsure else ""
        text += f" In {restless} of {len(pairs)} the step time did not settle." if restless else ""
    return Fact(figure=_times(middle), text=text, wide=True)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"


def _speed(ratio: float) -> str:
    return f"{_times(ratio)} as fast" if ratio >= 1 else f"{_times(1 / ratio)} as slow"


def _overlap(one: RunCell, other: RunCell) -> bool:
    a, b = stats.summarize(step_samples(one.run)), stats.summarize(step_samples(other.run))
    return a.low <= b.high and b.low <= a.high


def _best_utilization(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
    known = [(u.value, u, c) for c in cells if (u := utilization(c.run, "mfu", "causal")) and u.value is not None]
    if not known:
        return []
    value, used, cell = max(known, key=lambda item: item[0])
    peak = units.format_rate(used.peak_flops_per_s or 0, "FLOP/s")
    text = f"Highest MFU: {label(cell, fields)} ({used.convention}, of a dense {used.dtype} peak of {peak})."
    return [Fact(figure=format_share(value), text=text)]


def _largest_peak(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
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


def _waiting(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
    """The nearly launch-bound cells, in which faster kernels would gain less."""
    late = [c for c in cells if c.run.timing and waits_for_host(c.run.timing.back_to_back)]
    if not late:
        return []
    names = "; ".join(label(cell, fields) for cell in late[:_MOST_NAMED])
    more = f"; and {len(late) - _MOST_NAMED} more" if len(late) > _MOST_NAMED else ""
    share = f"{HARDLY_AHEAD:.0%}".replace("%", " %")
    text = f"Nearly launch-bound cells, in which the host leads by less than {share} of the step: {names}{more}."
    return [Fact(figure=f"{len(late)} of {len(cells)}", text=text, wide=True)]


def _failures(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
    found = []
    failed = [cell for cell in cells if cell.run.failure]
    for kind in dict.fromkeys(cell.run.status for cell in failed):
        alike = [cell for cell in failed if cell.run.status == kind]
        names = "; ".join(label(cell, fields) for cell in alike[:_MOST_NAMED])
        more = f"; and {len(alike) - _MOST_NAMED} more" if len(alike) > _MOST_NAMED else ""
        words = {"out_of_memory": "ran out of memory", "timeout": "timed out"}.get(kind, "failed")
        who = "cell" if len(alike) == 1 else "cells"
        found.append(
            Fact(
                figure=f"{len(alike)} of {len(cells)}",
                text=f"{who} {words}: {names}{more}.",
                wide=True,
                bad=True,
            )
        )
    return found
