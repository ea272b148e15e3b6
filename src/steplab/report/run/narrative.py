"""The main figures of several runs, each in a sentence that names the cells that it concerns."""

from collections.abc import Sequence

from steplab import units
from steplab.records.timing import HARDLY_AHEAD, waits_for_host
from steplab.report.kit.document import Fact
from steplab.report.run.cells import RunCell, label, varying
from steplab.report.run.effects import Effect, effect_words, effects_of, times_words
from steplab.report.run.verdict import main_effects

_MOST_NAMED = 6


def facts(cells: Sequence[RunCell]) -> list[Fact]:
    """The summary of several runs: the effect of each choice, the highest utilization and peak, and what waits."""
    fields = varying(cells)
    first = _gains(cells) + _best_utilization(cells, fields) + _largest_peak(cells, fields)
    return first + _waiting(cells, fields)


def _gains(cells: Sequence[RunCell]) -> list[Fact]:
    """The effect of each choice that the answer does not tell; those with a negligible effect share one sentence."""
    told = {effect.choice for effect in main_effects(cells)}
    effects = [effect for effect in effects_of(cells) if effect.choice not in told]
    gains = [gain_of(effect) for effect in effects if not effect.is_negligible]
    if negligible := [effect.choice for effect in effects if effect.is_negligible]:
        text = "Step times differ by no more than those of equal steps do, in every pair of runs that differ in one of "
        text += "these choices only"
        gains.append(Fact(figure="≈ 1×", text=f"{text}: {'; '.join(negligible)}.", wide=True))
    return gains


def gain_of(effect: Effect) -> Fact:
    """The range of the gains over the pairs that are certain, and how many those are."""
    ratios = [times_words(pair.ratio) for pair in effect.pairs if pair.decision in ("lower", "higher")]
    figure = " to ".join(dict.fromkeys((ratios[0], ratios[-1]))) if ratios else "undecided"
    return Fact(figure=figure, text=effect_words(effect), wide=True)


def _best_utilization(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
    found = [(cell.run.utilization("mfu", "causal"), cell) for cell in cells]
    known = [(u.value, u, cell) for u, cell in found if u and u.value is not None and not u.exceeds_peak]
    if not known:
        return []
    value, used, cell = max(known, key=lambda item: item[0])
    peak = units.format_rate(used.peak_flops_per_s or 0, "FLOP/s")
    text = f"is the highest MFU: {label(cell, fields)} ({used.convention}, of a dense {used.dtype} peak of {peak})."
    return [Fact(figure=units.format_share(value), text=text)]


def _largest_peak(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
    peaks = [(p.peak_allocated_bytes, c) for c in cells if (p := c.run.peak)]
    if not peaks:
        return []
    size, cell = max(peaks, key=lambda item: item[0])
    total = cell.run.memory.total_bytes if cell.run.memory else None
    of_total = f", of {units.format_bytes(total)} on the device" if total else ""
    text = f"is the largest peak of allocated memory: {label(cell, fields)}{of_total}."
    return [Fact(figure=units.format_bytes(size), text=text)]


def _waiting(cells: Sequence[RunCell], fields: Sequence[str]) -> list[Fact]:
    """The nearly launch-bound cells, in which faster kernels would gain less."""
    late = [c for c in cells if c.run.timing and waits_for_host(c.run.timing.back_to_back)]
    if not late:
        return []
    names = "; ".join(label(cell, fields) for cell in late[:_MOST_NAMED])
    more = f"; and {len(late) - _MOST_NAMED} more" if len(late) > _MOST_NAMED else ""
    share = units.format_limit(HARDLY_AHEAD)
    text = f"Nearly launch-bound cells, in which the host leads by less than {share} of the step: {names}{more}."
    return [Fact(figure=f"{len(late)} of {len(cells)}", text=text, wide=True)]
