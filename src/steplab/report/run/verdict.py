from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import fmean, median, stdev

from steplab import stats, units
from steplab.comparison.samples import compare_samples
from steplab.comparison.turns import judged
from steplab.records.disturbances import BUSY, WAITS, disturbances
from steplab.records.rows import Scalar
from steplab.records.run import Run
from steplab.report.kit.document import Fact, Verdict
from steplab.report.kit.grouping import grouped
from steplab.report.kit.quantities import FLOPS_PER_S
from steplab.report.kit.text import why_failed
from steplab.report.run.cells import AXES, COMPARED, RunCell, is_usual, label, said, varying
from steplab.report.run.effects import Effect, effect_words, effects_of, times_words
from steplab.report.run.one_run import achieved_flops_per_s, headline_doubts, interval_words
from steplab.specs.resolve import options

_MOST_EFFECTS = 2
_MOST_NAMED = 3
_NAMED = ("model", "context", "batch", "pass", "precision", "compile", "attention", "layout")
_UNTIMED = "step time: "
_BY_INTEREST = ("precision", "compile")


def runs_verdict(cells: Sequence[RunCell]) -> Verdict:
    if len(cells) == 1:
        run = cells[0].run
        return Verdict(sentences=tuple(_one(run)), cautions=tuple(run_cautions(run)))
    return Verdict(sentences=tuple(_several(cells)), cautions=tuple(_cautions(cells)))


def _one(run: Run) -> Iterator[str]:
    if run.failure:
        yield f"{why_failed(run.failure, most=None)}."
    samples = run.samples_s
    if not samples:
        untimed = (note.removeprefix(_UNTIMED) for note in run.notes if note.startswith(_UNTIMED))
        if not run.failure and (why := next(untimed, None)):
            yield f"No step was timed: {why}."
        return
    summary = stats.summarize(samples)
    whose = " of rank 0" if run.ranks else ""
    yield f"A step{whose} takes {units.format_time(summary.median)} ({interval_words(summary)})."
    tokens = run.tokens_per_step
    told = [units.format_rate(tokens / summary.median, f" {_tokens_per_s(run)}")] if tokens else []
    used = run.utilization("mfu", "causal")
    if used and used.value is not None and (achieved := achieved_flops_per_s(used)):
        rate, peak = (units.format_rate(value, "FLOP/s") for value in (achieved, used.peak_flops_per_s or 0.0))
        peaks = f"{used.num_devices} × {peak}" if used.num_devices > 1 else peak
        share = f", {units.format_share(used.value)} of the dense {used.dtype} peak of {peaks}"
        told.append(f"{rate} of model FLOPs{'' if used.exceeds_peak else share}")
    if told:
        yield f"That is {'; '.join(told)}."
    yield from _fewer_threads([run])
    if used and used.value is None:
        yield f"Its MFU is not known: {used.peak_source}."


def _tokens_per_s(run: Run) -> str:
    ranks = run.spec.layout.world_size if run.spec else 1
    on_gpus = run.environment is not None and run.environment.device.kind == "cuda"
    return f"tokens/s on {ranks} {'GPUs' if on_gpus else 'ranks'}" if ranks > 1 else "tokens/s"


def _fewer_threads(runs: Sequence[Run]) -> Iterator[str]:
    tried = [(run, run.timing.one_thread_s) for run in runs if run.timing and run.timing.one_thread_s and run.spec]
    ratios = [(run, compare_samples([run.samples_s], [alone], in_turns=False)) for run, alone in tried]
    faster = [(run, ratio) for run, ratio in ratios if ratio.decision == "lower"]
    if not faster:
        return
    run, ratio = min(faster, key=lambda pair: pair[1].ratio)
    busy = any(disturbance.word == BUSY for disturbance in disturbances(run))
    begin = "While other processes keep processors busy, with one thread" if busy else "With one thread"
    if len(runs) > 1:
        yield (
            f"{begin} {len(faster)} of {len(runs)} steps are faster, up to {times_words(1 / ratio.ratio)}: set "
            "OMP_NUM_THREADS=1."
        )
    elif run.spec:
        yield (
            f"{begin} it takes {units.format_time(ratio.b)}, {times_words(1 / ratio.ratio)} as fast: "
            f"OMP_NUM_THREADS=1 steplab run {options(run.spec)}"
        )


def run_cautions(run: Run) -> Iterator[str]:
    """Warn of a disturbed step time and impossible shares, with the command to repeat the run."""
    found = disturbances(run)
    for disturbance in found:
        yield f"Warning: {disturbance.text}"
    for doubt in headline_doubts(run):
        yield f"Warning: {doubt}."
    if found and run.spec and all(disturbance.word == WAITS for disturbance in found):
        if not run.profile:
            yield f"To see why it waits: steplab profile {options(run.spec)}"
    elif found and run.spec:
        verb = "profile" if run.profile else "memory" if run.memory_profile else "run"
        yield f"Repeat it on a quiet machine, or raise --steps: steplab {verb} {options(run.spec)}"


def _several(cells: Sequence[RunCell]) -> Iterator[str]:
    fields = varying(cells)
    early, told, effects = _warmup_words(cells, fields), list(trend_words(cells, fields)), main_effects(cells)
    if early and not effects:
        yield early
    yield from chain.from_iterable(map(effect_words, effects))
    yield from told
    if early and effects:
        yield early
    yield from _fewer_threads([cell.run for cell in cells])
    if not early and not told and not effects and (taken := _times_words(cells, fields)):
        yield taken


def _warmup_words(cells: Sequence[RunCell], fields: Sequence[str]) -> str:
    """Contrasts means after the fewest and the most warm-up steps, where they differ most; empty if warm-up is
    constant.
    """
    if "warmup" not in fields:
        return ""
    rest = [name for name in COMPARED if name not in ("warmup", "repeat")]
    timed = [cell for cell in cells if len(cell.run.samples_s) > 1]
    groups = grouped(timed, lambda cell: tuple(cell.values[name] for name in rest)).values()
    ends = [(group[0], group[-1]) for group in groups if group[0].values["warmup"] != group[-1].values["warmup"]]
    if not ends:
        return ""
    few, many = max(ends, key=lambda pair: fmean(pair[0].run.samples_s) / fmean(pair[1].run.samples_s))
    told = label(few, [name for name in fields if name in _NAMED])
    means = [
        f"{units.format_time(fmean(cell.run.samples_s))} (SD {units.format_time(stdev(cell.run.samples_s))}) after "
        f"{units.counted(int(cell.values['warmup'] or 0), 'warm-up step')}"
        for cell in (few, many)
    ]
    return f"The mean step{f' of {told}' if told else ''} is {' and '.join(means)}."


def _times_words(cells: Sequence[RunCell], fields: Sequence[str]) -> str:
    timed = sorted((cell for cell in cells if cell.run.median_s), key=lambda cell: cell.run.median_s or 0)
    times = [(label(cell, fields), units.format_time(cell.run.median_s or 0)) for cell in timed]
    if not times:
        return ""
    if len(times) <= _MOST_NAMED:
        return f"{'; '.join(f'{name} takes {taken}' for name, taken in times)}."
    (fastest, least), (slowest, most) = times[0], times[-1]
    return f"The fastest of {len(times)} runs, {fastest}, takes {least}; the slowest, {slowest}, {most}."


def main_effects(cells: Sequence[RunCell]) -> list[Effect]:
    """Choose one effect per field: precision and compilation first, then by number of pairs, then by gain."""
    of_field: dict[str, Effect] = {}
    for effect in sorted((effect for effect in effects_of(cells) if not effect.is_negligible), key=_interest):
        of_field.setdefault(effect.field, effect)
    return list(of_field.values())[:_MOST_EFFECTS]


def _interest(effect: Effect) -> tuple[int, int, float]:
    place = _BY_INTEREST.index(effect.field) if effect.field in _BY_INTEREST else len(_BY_INTEREST)
    return place, -len(effect.pairs), -effect.pairs[-1].ratio


def trend_words(cells: Sequence[RunCell], fields: Sequence[str]) -> Iterator[str]:
    """State how step time grows along the longest series of sizes whose ends certainly differ."""
    found = [(axis, series) for axis in AXES if (series := _series(cells, axis))]
    if not found:
        return
    axis, series = max(found, key=lambda pair: _telling(pair[1]))
    first, last = series[0], series[-1]
    before_s, after_s = (median(cell.run.samples_s) for cell in (first, last))
    others = [n for n in fields if n != axis and n in _NAMED and not is_usual(n, first.values[n])]
    told = label(first, others) if any(first.values[name] is not None for name in others) else ""
    told = f" ({told})" if others and told else ""
    yield (
        f"From {said(axis, first.values[axis])} to {said(axis, last.values[axis])}{told} the step takes "
        f"{times_words(after_s / before_s)} as long, {units.format_time(after_s)} instead of "
        f"{units.format_time(before_s)}."
    )
    used = [share for cell in (first, last) if (share := cell.run.utilization("mfu", "causal")) and share.flops]
    if len(used) == 2:
        work = f"It does {(used[1].flops or 0.0) / (used[0].flops or 1.0):.1f} times the model FLOPs"
        shares = [units.format_share(u.value) for u in used if u.value is not None and not u.exceeds_peak]
        yield f"{work}{f'; MFU goes from {shares[0]} to {shares[1]}' if len(shares) == 2 else ''}."


def _telling(series: Sequence[RunCell]) -> tuple[int, bool]:
    return len(series), series[0].values["pass"] == "train"


def _series(cells: Sequence[RunCell], axis: str) -> list[RunCell]:
    """Longest series of cells that differ only in `axis`, by size, whose ends certainly differ; else empty."""
    groups: dict[tuple[object, ...], dict[Scalar, RunCell]] = {}
    for cell in cells:
        spec = cell.run.spec
        if spec is None or spec.model.kind == "factory" or not cell.run.median_s or cell.values[axis] is None:
            continue
        key = (spec.model.kind, *(cell.values[name] for name in COMPARED if name not in (axis, "repeat")))
        groups.setdefault(key, {})[cell.values[axis]] = cell
    series = [list(group.values()) for group in groups.values() if len(group) > 1]
    if axis == "model":
        for cells_of_one in series:
            cells_of_one.sort(key=lambda cell: cell.run.model.num_parameters if cell.run.model else 0)
    certain = [
        one for one in series if (ratio := judged(one[0].run, one[-1].run)) and ratio.decision in ("higher", "lower")
    ]
    return max(certain, key=_telling, default=[])


def _cautions(cells: Sequence[RunCell]) -> Iterator[str]:
    fields = varying(cells)
    doubtful = [(cell, found) for cell in cells if (found := disturbances(cell.run))]
    if doubtful:
        words = Counter(disturbance.word for _, found in doubtful for disturbance in found)
        counted = len(doubtful) > 1 and len(words) > 1
        kinds = ", ".join(f"{word} {count}" if counted else word for word, count in words.items())
        few = len(doubtful) <= _MOST_NAMED
        where = f": {_named([cell for cell, _ in doubtful], fields)}" if few else "; their rows are marked"
        yield (
            f"Warning: the step time of {len(doubtful)} of {units.counted(len(cells), 'run')} is doubtful ({kinds})"
            f"{where}."
        )
    over = [cell for cell in cells if headline_doubts(cell.run)]
    for doubt in dict.fromkeys(doubt for cell in over for doubt in headline_doubts(cell.run)):
        alike = [cell for cell in over if doubt in headline_doubts(cell.run)]
        yield f"Warning: {doubt} ({_named(alike, fields)})."
    failed = [cell for cell in cells if cell.run.failure]
    for kind in dict.fromkeys(cell.run.status for cell in failed):
        alike = [cell for cell in failed if cell.run.status == kind]
        verb = {"out_of_memory": "ran out of memory", "timeout": "timed out"}.get(kind, "failed")
        yield f"{len(alike)} of {units.counted(len(cells), 'run')} {verb}: {_named(alike, fields)}."


def _named(cells: Sequence[RunCell], fields: Sequence[str]) -> str:
    telling = [name for name in fields if name in _NAMED]
    names = list(dict.fromkeys(label(cell, telling) for cell in cells))
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return "; ".join(names[:_MOST_NAMED]) + more


def facts(cells: Sequence[RunCell]) -> Iterator[Fact]:
    """State one run's figures, or the highest of several runs; the highest MFU for each peak FLOP/s."""
    fields = varying(cells)

    def of(cell: RunCell, words: str, more: str = "", which: str = "the highest") -> str:
        if len(cells) == 1:
            return words + more
        return f"{words}, {which}{more} ({_named([cell], fields)})"

    if len(cells) == 1 and (step_s := cells[0].run.median_s):
        yield Fact(figure=units.format_time(step_s), text="a step")
    rates = [(c.run.tokens_per_step / c.run.median_s, c) for c in cells if c.run.tokens_per_step and c.run.median_s]
    if rates:
        rate, cell, which = _highest(rates)
        yield Fact(figure=units.format_rate(rate, ""), text=of(cell, _tokens_per_s(cell.run), which=which))
    used = {c.id: u for c in cells if (u := c.run.utilization("mfu", "causal")) and u.value and not u.exceeds_peak}
    if shares := [(used[c.id].value or 0.0, c) for c in cells if c.id in used]:
        share, cell, which = _highest(shares)
        most = used[cell.id]
        text = of(cell, "MFU", f", of a dense {most.dtype} peak of {FLOPS_PER_S.show(most.peak_flops_per_s)}", which)
        for dtype, alike in grouped(shares, lambda one: used[one[1].id].dtype).items():
            if dtype != most.dtype:
                other, cell, which = _highest(alike)
                peak = f" of {dtype}'s {FLOPS_PER_S.show(used[cell.id].peak_flops_per_s)}"
                text += f"; {of(cell, units.format_share(other), peak, which)}"
        yield Fact(figure=units.format_share(share), text=text)
    peaks = [(p.peak_allocated_bytes, c) for c in cells if (p := c.run.peak)]
    if peaks:
        size, cell = max(peaks, key=lambda one: one[0])
        total = cell.run.memory.total_bytes if cell.run.memory else None
        of_total = f", of {units.format_bytes(total)} on the device" if total else ""
        yield Fact(figure=units.format_bytes(size), text=of(cell, "peak of allocated memory", of_total))


def _highest(found: Sequence[tuple[float, RunCell]]) -> tuple[float, RunCell, str]:
    """Highest figure of runs without a warning, if there are any."""
    figure, cell = max(found, key=lambda one: (not disturbances(one[1].run), one[0]))
    return figure, cell, "the highest without a warning" if figure < max(other for other, _ in found) else "the highest"
