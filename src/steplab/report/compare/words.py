from collections.abc import Iterable, Iterator, Sequence

from steplab import units
from steplab.records import comparison as compared
from steplab.report.kit.document import Verdict
from steplab.report.kit.kernel_names import short_kernels
from steplab.report.kit.quantities import in_unit
from steplab.report.memory.categories import category_word
from steplab.specs.changes import numerics_of_fp8

_NAMED = 3
_SEEN = 0.01
_OF_TOKENS = ("batch", "context", "accumulation", "layout", "tokens_per_step")
"""Fields that set the tokens of a step."""
_ELEMENTWISE = ("elementwise", "reduce", "copy", "mul", "add", "div", "sub", "sum", "mean", "pow", "rsqrt", "cast")


def verdict(comparison: compared.Comparison) -> Verdict:
    causes = [*(_where(change) for change in comparison.kernels[:_NAMED])]
    causes += [memory_words(change) for change in comparison.memory[:1]]
    told = (f"Largest differences: {'; '.join(causes)}.",) if causes else ()
    return Verdict(sentences=(_answer(comparison), *_unlike(comparison), *told), cautions=tuple(_cautions(comparison)))


def _answer(comparison: compared.Comparison) -> str:
    if _are_the_same(comparison):
        return "A and B are the same records, so nothing can differ."
    if comparison.failed:
        return f"B is worse: {'; '.join(comparison.failed)}."
    if not comparison.deciding:
        return "Undecided: A and B have neither a step time nor a peak memory in common."
    cells = len({figure.cell for figure in comparison.deciding})
    with_tokens = "".join(f", with {times:.3g}× the tokens a step" for times, _ in _rates_of_other_steps(comparison))
    higher, lower = ("B costs more", "B costs less") if with_tokens else ("B is worse", "B is better")

    def named(found: Sequence[compared.ComparedFigure]) -> str:
        where = f" in {len({figure.cell for figure in found})} of {cells} cells" if cells > 1 else with_tokens
        return f"{where}: {units.listed([figure_words(figure) for figure in found[:_NAMED]])}"

    if found := comparison.regressions:
        return f"{higher}{named(found)}."
    if found := comparison.undecided:
        first = found[0].ratio
        advice = f"; {first.why}" if first and first.why else ""
        advice += f"; about {first.more} more samples of each side would decide" if first and first.more else ""
        return f"Undecided{named(found)}{advice}."
    better = [figure for figure in comparison.deciding if figure.ratio and figure.ratio.decision == "lower"]
    if better:
        rest = list(dict.fromkeys(figure.name for figure in comparison.deciding if figure not in better))
        others = f"; {units.listed(rest)} no worse{' elsewhere' if cells > 1 else ''}" if rest else ""
        return f"{lower}{named(sorted(better, key=lambda figure: figure.b / figure.a))}{others}."
    if open_ones := [one for one in comparison.deciding if one.ratio and one.ratio.decision == "not higher"]:
        return f"B is not worse, and may be better{named(open_ones)}."
    if cells > 1:
        return f"No difference in {cells} cells, beyond {_thresholds(comparison.deciding)}."
    return f"No difference: {units.listed([figure_words(figure) for figure in comparison.deciding])}."


def _unlike(comparison: compared.Comparison) -> Iterator[str]:
    if comparison.allowed and not _are_the_same(comparison):
        yield f"They differ in {'; '.join(map(unlike_words, comparison.allowed))}."
    if rates := [figure_words(rate) for _, rate in _rates_of_other_steps(comparison)]:
        yield f"Throughput: {units.listed(rates[:_NAMED])}."


def _rates_of_other_steps(comparison: compared.Comparison) -> Iterator[tuple[float, compared.ComparedFigure]]:
    """Tokens per second of cells whose steps differ in tokens, each after B's tokens over A's."""
    if not any(found.field in _OF_TOKENS for found in comparison.allowed):
        return
    steps = {figure.cell: figure.b / figure.a for figure in comparison.figures if figure.name == "step time"}
    for rate in comparison.figures:
        if rate.name == "tokens per second" and abs((times := steps[rate.cell] * rate.b / rate.a) - 1) > _SEEN:
            yield times, rate


def figure_words(figure: compared.ComparedFigure) -> str:
    """Example: 'step time 20.6 ms instead of 20.0 ms, 1.030× (95 % interval 1.021 to 1.038; threshold 1 %)'."""
    cell = f"{figure.cell}: " if figure.cell else ""
    if figure.a == figure.b:
        return f"{cell}{figure.name} {in_unit(figure.b, figure.unit)} in both"
    values = f"{in_unit(figure.b, figure.unit)} instead of {in_unit(figure.a, figure.unit)}"
    return f"{cell}{figure.name} {values}{_ratio_words(figure.ratio)}"


def _ratio_words(ratio: compared.Ratio | None) -> str:
    if ratio is None:
        return ""
    interval = interval_words(ratio)
    told = f"95 % interval {interval}; " if interval else ""
    return f", {ratio.ratio:.3f}× ({told}threshold {units.format_limit(ratio.threshold)})"


def interval_words(ratio: compared.Ratio | None) -> str | None:
    if ratio is None or ratio.low is None or ratio.high is None:
        return None
    return f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio.low < ratio.high else None


def _thresholds(figures: Sequence[compared.ComparedFigure]) -> str:
    found = sorted({figure.ratio.threshold for figure in figures if figure.ratio})
    return " and ".join(map(units.format_limit, found))


def _cautions(comparison: compared.Comparison) -> Iterator[str]:
    remedy = "measure each side in six processes or more, all under one name"
    if comparison.can_run_again:
        remedy = "alternate A and B with `steplab ab`"
    if _are_the_same(comparison):
        return
    yield from numerics_of_fp8(
        [str(value) for each in comparison.allowed if each.field == "precision" for value in (each.a, each.b)]
    )
    sampled = [figure for figure in comparison.deciding if figure.ratio and figure.ratio.p is not None]
    if comparison.doubts:
        doubts = " ".join(comparison.doubts)
        yield f"Warning: {doubts} Intervals are widened for the spread between such runs; for narrower ones, {remedy}."
    elif sampled and not comparison.in_turns and len(comparison.a.ids) == len(comparison.b.ids) == 1:
        yield (
            "Each side is one process. The same step varies more between processes than within one: "
            f"for differences of a few per cent, {remedy}."
        )


def _are_the_same(comparison: compared.Comparison) -> bool:
    return set(comparison.a.ids) == set(comparison.b.ids)


def unlike_words(found: compared.Unlike) -> str:
    return f"{found.field.replace('_', ' ')}: {found.values}"


# --- kernels ----------------------------------------------------------------------------------------------


def kernel_words(change: compared.KernelChange) -> str:
    return f"{_where(change)}: {_what_changed(change)}"


def _where(change: compared.KernelChange) -> str:
    cell = f"{change.cell}: " if change.cell else ""
    of_what = f" of {change.range}" if change.range else f", category {change.category}" if change.category else ""
    return f"{cell}{units.signed(change.b_s - change.a_s, units.format_time)} per step in {change.phase}{of_what}"


def _what_changed(change: compared.KernelChange) -> str:
    names_a, names_b = ({kernel.name for kernel in kernels} for kernels in (change.a, change.b))
    gone = [kernel for kernel in change.a if kernel.name not in names_b]
    new = [kernel for kernel in change.b if kernel.name not in names_a]
    short = short_kernels([kernel.name for kernel in (*gone, *new)], most=40)
    if not change.a:
        return f"{_kernels(new, short)} in B alone"
    if not change.b:
        return f"{_kernels(gone, short)} in A alone"
    if gone and new:
        return f"{_kernels(new, short)} instead of {_kernels(gone, short)}{_fusion(gone, new)}"
    if new:
        return f"{_kernels(new, short)} added"
    if gone:
        return f"{_kernels(gone, short)} no longer called"
    calls = [sum(kernel.calls for kernel in kernels) for kernels in (change.a, change.b)]
    if calls[0] != calls[1]:
        return f"the same kernels in {_calls(calls[1])} instead of {calls[0]:g}"
    return f"the same kernels take {change.b_s / change.a_s:.2f}× the time"


def _fusion(gone: Sequence[compared.KernelCount], new: Sequence[compared.KernelCount]) -> str:
    before, after = sum(kernel.calls for kernel in gone), sum(kernel.calls for kernel in new)
    if len(new) > len(gone) and after > before and all(map(_small, new)):
        return ", no longer fused"
    if len(gone) > len(new) and before > after and all(map(_small, gone)):
        return ", now fused"
    return ""


def _small(kernel: compared.KernelCount) -> bool:
    name = kernel.name.lower()
    return "fused" not in name and any(part in name for part in _ELEMENTWISE)


def _kernels(kernels: Sequence[compared.KernelCount], short: dict[str, str]) -> str:
    named = [
        f"{short[kernel.name]} ({_calls(kernel.calls)}, {units.format_time(kernel.time_s)})"
        for kernel in kernels[:_NAMED]
    ]
    if len(kernels) > _NAMED:
        named.append(f"{len(kernels) - _NAMED} more")
    return units.listed(named)


def _calls(calls: float) -> str:
    return f"{calls:g} call{'' if calls == 1 else 's'}"


# --- memory -----------------------------------------------------------------------------------------------


def memory_words(change: compared.MemoryChange) -> str:
    """Example: '+412 MiB of activations: [4, 512, 10000] of head, float32 instead of bfloat16'."""
    cell = f"{change.cell}: " if change.cell else ""
    size = f"{units.signed(change.change_bytes, units.format_bytes)} of {category_word(change.category)}"
    what = "tensors" if change.shape is None else f"{list(change.shape)}"
    where = f" of {change.module}" if change.module else f" by {change.op}" if change.op else ""
    return f"{cell}{size}: {what}{where}, {_held(change)}"


def _held(change: compared.MemoryChange) -> str:
    dtypes_a, dtypes_b = (
        " and ".join(held.dtype or "unknown format" for held in side) for side in (change.a, change.b)
    )
    if not change.a:
        return f"{dtypes_b}, in B alone"
    if not change.b:
        return f"{dtypes_a}, in A alone"
    if dtypes_a != dtypes_b:
        return f"{dtypes_b} instead of {dtypes_a}"
    return f"{units.format_bytes(_total(change.b))} instead of {units.format_bytes(_total(change.a))} in {dtypes_b}"


def _total(held: Iterable[compared.TensorBytes]) -> int:
    return sum(each.num_bytes for each in held)
