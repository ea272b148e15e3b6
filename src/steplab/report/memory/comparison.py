"""Explains, by category, the difference of a cell's peak from the same cell in fp32 or without checkpointing."""

from collections.abc import Iterator, Sequence

from steplab import units
from steplab.records.memory_profile import MemoryProfile, SavedTensors
from steplab.records.memory_references import Fp32Forecast, MemoryReferences
from steplab.records.run import Run
from steplab.report.memory import figures
from steplab.report.memory.categories import category_word, in_order
from steplab.report.memory.figures import among, counterpart
from steplab.report.memory.tables import is_checkpointed, is_compiled, is_weight_shape, node_name
from steplab.report.run.cells import RunCell
from steplab.report.run.one_run import precision_words
from steplab.specs.step import AUTOCAST
from steplab.specs.step_choices import WITH_MASTERS

_SAFELY = 2
"""Smallest predicted difference, in multiples of the prediction's error, that is stated as lower or higher."""
_ESTIMATES_ARE_OFF = 0.03
"""Largest relative error of an estimate over the recorded compiled steps."""
_CLOSE = 1e-3


def forecast_sentence(name: str, profile: MemoryProfile, forecast: Fp32Forecast) -> str:
    """Effect of the low precision `name` on the peak, compared with the dry run in fp32 and its error."""
    own, fp32, measured = forecast.own.peak_bytes, forecast.fp32.peak_bytes, profile.peak_bytes
    error = abs(own - measured)
    is_estimate = "estimate" in (forecast.own.kind, forecast.fp32.kind)
    how = "estimate" if is_estimate else "dry run"
    doubt = max(_SAFELY * error, int(_ESTIMATES_ARE_OFF * measured) if is_estimate else 0)
    met = "exactly" if not error else f"within {_up(100 * error / measured)} %"
    predicts = f"predicts {units.format_bytes(fp32)} in fp32"
    text = f"The same cell in fp32 was not measured. The {how} of the step, which gives this peak {met}, {predicts}"
    moved = moved_words(measured, fp32)
    if moved is None and not is_estimate:
        return f"{text}: with {name} the peak is the same."
    if moved is None or abs(measured - fp32) <= doubt:
        return f"{text}, too close to this cell's peak to say whether {name} lowers or raises it."
    size = units.format_bytes(abs(measured - fp32))
    text += f": with {name} the peak is {moved}, by {size}."
    if profile.peak_phase and profile.peak_phase != forecast.fp32.peak_phase:
        text += f" In fp32 the peak would be in {forecast.fp32.peak_phase}."
    return text


def _up(percent: float) -> str:
    return f"{max(percent, 0.01):.2f}"


def moved_words(after: int, before: int) -> str | None:
    """'3.9 % lower'; None if both sizes have the same text."""
    if abs(after - before) <= _CLOSE * before and units.format_bytes(after) == units.format_bytes(before):
        return None
    direction = "lower" if after < before else "higher"
    if not before:
        return f"{units.format_bytes(after)} {direction}"
    percent = 100 * abs(after - before) / before
    return f"{percent:.1f} % {direction}" if percent >= 0.1 else f"{percent:.1g} % {direction}"


_SAME = 0.001  # relative change below which a category counts as unchanged
_STATES = ("parameters", "gradients", "optimizer_state")
_SINGULAR = ("optimizer_state", "rounding")
_NAMED = 3
_NEXT_TO_NOTHING = 0.005  # below this ratio a category has almost vanished


def comparison_sentences(
    cell: RunCell, cells: Sequence[RunCell], references: MemoryReferences | None = None
) -> Iterator[str]:
    """Effects of a cell's precision and checkpointing on its peak; `cells` and `references` may have the same cell
    without them.
    """
    own, every = among(cell.run, (*(other.run for other in cells), *(references.others if references else ())))

    def run_of(found: RunCell | None) -> Run | None:
        return found.run if found else None

    forecast = references.forecasts.get(cell.run.id) if references else None
    yield from precision_sentences(cell.run, run_of(counterpart(own, every, "precision", "fp32")), forecast)
    yield from checkpointing_sentences(cell.run, run_of(counterpart(own, every, "checkpointing", "none")))


def precision_sentences(run: Run, baseline: Run | None, forecast: Fp32Forecast | None = None) -> Iterator[str]:
    """Why the run's precision does or does not lower the peak.

    `baseline` is the same cell in fp32, if measured; else `forecast` is its dry run. No sentences for runs in fp32 or
    tf32 (both have float32 tensors), or without a profile.
    """
    profile = run.memory_profile
    if profile is None or run.spec is None or run.spec.precision in ("fp32", "tf32"):
        return
    name = precision_words(run.spec.precision)
    alone = baseline is None or baseline.memory_profile is None
    if baseline is not None and baseline.memory_profile is not None:
        yield _change(name, "fp32", profile, baseline.memory_profile)
        yield from _moments(name, "fp32", profile, baseline.memory_profile)
    elif forecast:
        yield forecast_sentence(name, profile, forecast)
    if run.spec.precision in AUTOCAST:
        yield from _saved(run, profile, alone=alone)


def checkpointing_sentences(run: Run, baseline: Run | None) -> Iterator[str]:
    """`baseline` is the same cell without checkpointing."""
    profile = run.memory_profile
    if profile is None or run.spec is None or run.spec.checkpointing == "none" or not run.spec.checkpoints_apply:
        return
    if baseline is None or baseline.memory_profile is None:
        return
    name = f"checkpointing ({run.spec.checkpointing})"
    yield _change(name, "no checkpointing", profile, baseline.memory_profile)
    yield from _moments(name, "no checkpointing", profile, baseline.memory_profile)
    after_s, before_s = run.median_s, baseline.median_s
    if after_s and before_s:
        yield (
            f"The step takes {units.format_time(after_s)} instead of {units.format_time(before_s)} "
            f"({units.format_change(after_s / before_s - 1)})."
        )


def _change(name: str, other: str, after: MemoryProfile, before: MemoryProfile) -> str:
    change = after.peak_bytes - before.peak_bytes
    size = units.format_bytes
    moved = moved_words(after.peak_bytes, before.peak_bytes) or "the same"
    text = f"With {name} the peak is {moved}: "
    text += f"{size(after.peak_bytes)}, against {size(before.peak_bytes)} with {other}."
    reasons = [*_stays(after, before), *_moves(after, before)]
    return f"{text} {'; '.join(reasons)}; net {units.signed(change, units.format_bytes)}." if reasons else text


def _stays(after: MemoryProfile, before: MemoryProfile) -> Iterator[str]:
    there = [c for c in in_order(before.at_peak) if before.at_peak.get(c)]
    staying = [c for c in there if _is_same(after.at_peak.get(c, 0), before.at_peak[c]) and c != "rounding"]
    if staying:
        names = units.listed([category_word(category) for category in staying])
        size = units.format_bytes(figures.at_peak(before, *staying))
        yield f"{names[0].upper()}{names[1:]} {_verb('stay', *staying)} at {size}"


def _moves(after: MemoryProfile, before: MemoryProfile) -> Iterator[str]:
    names = in_order((*before.at_peak, *after.at_peak))
    pairs = [(name, after.at_peak.get(name, 0), before.at_peak.get(name, 0)) for name in names]
    moved = [pair for pair in pairs if not _is_same(pair[1], pair[2])]
    for category, now, then in sorted(moved, key=lambda pair: -abs(pair[1] - pair[2])):
        word, change = category_word(category), units.signed(now - then, units.format_bytes)
        if not then:
            yield f"{word} {_verb('add', category)} {units.format_bytes(now)} ({change})"
        elif not now:
            yield f"the {units.format_bytes(then)} of {word} disappear ({change})"
        else:
            verb = _verb("shrink" if now < then else "grow", category)
            sizes = f"from {units.format_bytes(then)} to {units.format_bytes(now)}"
            yield f"{word} {verb} {sizes} ({', '.join(filter(None, (_times(now / then), change)))})"


def _verb(stem: str, *categories: str) -> str:
    return f"{stem}s" if len(categories) == 1 and categories[0] in _SINGULAR else stem


def _times(ratio: float) -> str:
    """0.79×, 1.9×, 40×; words near zero or beyond all measure; '' where it rounds to one."""
    if ratio < _NEXT_TO_NOTHING:
        return "almost nothing is left"
    if ratio > 1 / _NEXT_TO_NOTHING:
        return "almost nothing before"
    digits = float(f"{ratio:.2g}")
    if digits == 1:
        return ""
    return f"{digits:.0f}×" if digits >= 10 else f"{digits:#.2g}×"


def _is_same(now: int, then: int) -> bool:
    return abs(now - then) <= _SAME * max(now, then)


def _moments(name: str, other: str, after: MemoryProfile, before: MemoryProfile) -> Iterator[str]:
    if after.peak_phase and before.peak_phase and after.peak_phase != before.peak_phase:
        yield (
            f"The two peaks are at different moments: with {other} in {before.peak_phase}, with {name} in "
            f"{after.peak_phase}."
        )


def _saved(run: Run, profile: MemoryProfile, *, alone: bool) -> Iterator[str]:
    every = [tensors for tensors in profile.saved if tensors.category == "activations" and tensors.stored_bytes]
    every.sort(key=lambda tensors: -tensors.stored_bytes)
    casts = [tensors for tensors in every if _is_cast(tensors, run)]
    unsure = [tensors for tensors in every if _is_cast(tensors, run) is None]
    saved = [tensors for tensors in every if tensors not in casts]
    if casts:
        yield (
            f"The compiled graph saves {units.format_bytes(figures.saved_bytes(casts))} of {_dtypes(casts)} casts of "
            "weights, recognised by their shapes; the table of the peak counts them as activations."
        )
    if unsure:
        yield (
            f"{units.format_bytes(figures.saved_bytes(unsure))} of {_dtypes(unsure)} may be casts of weights or "
            "activations, which their shapes do not tell apart; they are counted as activations here."
        )
    low = [tensors for tensors in saved if tensors.dtype in figures.LOW_PRECISION]
    full = [tensors for tensors in saved if tensors.dtype == "float32"]
    total = figures.saved_bytes(saved)
    if total:
        share = (
            f"{units.format_percent(figures.saved_bytes(low) / total)} is {_dtypes(low)}"
            if low
            else "nothing is in low precision"
        )
        yield f"Saved for backward: {units.format_bytes(total)} of activations; {share}{_still_full(full, run)}."
    states = figures.at_peak(profile, *_STATES)
    of_states = f"{units.format_bytes(states)}, {units.format_percent(states / profile.peak_bytes)} of the peak."
    if alone and run.spec is not None and run.spec.precision in WITH_MASTERS:
        yield (
            "A weight of a linear layer and its fp32 master take 6 bytes where fp32 takes 4, and its gradient 2 where "
            f"fp32 takes 4: parameters, gradients and optimizer state are {of_states}"
        )
    elif alone:
        yield f"Autocast does not change parameters, gradients and optimizer state: {of_states}"


def _is_cast(tensors: SavedTensors, run: Run) -> bool | None:
    """True for weights that a compiled graph cast, by their shape; None if ambiguous. An eager step's casts are
    autocast copies.
    """
    if tensors.dtype not in figures.LOW_PRECISION or not is_compiled(tensors):
        return False
    if run.spec is None or run.spec.model.shape is None:
        return None
    return is_weight_shape(tensors.shape, run.spec)


def _dtypes(saved: Sequence[SavedTensors]) -> str:
    return " and ".join(dict.fromkeys(tensors.dtype for tensors in saved))


def _still_full(full: Sequence[SavedTensors], run: Run) -> str:
    if not full:
        return ""
    by_node: dict[str, int] = {}
    nobody = "checkpointing" if is_checkpointed(run.spec) else "no operator"
    for tensors in full:
        node = "the compiled graph" if is_compiled(tensors) else node_name(tensors.op) or nobody
        by_node[node] = by_node.get(node, 0) + tensors.stored_bytes
    most = sorted(by_node, key=lambda node: -by_node[node])[:_NAMED]
    names = ", ".join(f"{node} {units.format_bytes(by_node[node])}" for node in most)
    who = "" if all(map(is_compiled, full)) else f" (most of it: {names})"
    return f"; {units.format_bytes(figures.saved_bytes(full))} stay in float32{who}"
