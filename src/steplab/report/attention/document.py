import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import geometric_mean

from steplab import units
from steplab.ops.attention.implementations import implementation
from steplab.records.attention import AttentionAccount, AttentionCell, AttentionRun
from steplab.records.comparison import Ratio
from steplab.report.attention import figures
from steplab.report.attention.charts import memory_charts, rate_charts
from steplab.report.attention.figures import PASS_WORDS, SCATTERED
from steplab.report.kit.document import Document, Fact, Section, Sentences, Verdict
from steplab.report.kit.quantities import BYTES, FLOPS_PER_S, TIMES
from steplab.report.kit.text import dotted, interruption, made, quoted_name, why_failed
from steplab.report.report import RecordReport, extremes
from steplab.specs.attention import PASSES

_WIDE = 0.1
"""Half width of a confidence interval, relative to the mean, above which both ends are printed instead of ±."""
_MOST_TOLD = 3
_ABSENT = re.compile(r"(flash-attn-4) (?:cannot|is not to) be imported \(No module named 'flash_attn\b")
"""Matches the message of a missing flash-attn-4 package, also in the words of older records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Comparison:
    column: str
    ratios: tuple[Ratio, ...]
    speeds: tuple[float, ...]
    slowest_at: str
    chose_peer: bool
    """True if the implementation is `auto` and chose the peer, the one compared with, on every shape."""

    @property
    def mean(self) -> float:
        return geometric_mean(self.speeds)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """95 % interval of `mean`, if the shapes' errors are independent; None if a shape has no interval."""
        ends = [(r.high / r.ratio, r.ratio / r.low) for r in self.ratios if r.low and r.high]
        if len(ends) < len(self.ratios):
            return None
        below, above = (math.hypot(*map(math.log, side)) / len(ends) for side in zip(*ends, strict=True))
        return self.mean / math.exp(below), self.mean * math.exp(above)

    @property
    def num_faster(self) -> int:
        return sum(ratio.decision == "lower" for ratio in self.ratios)

    @property
    def num_slower(self) -> int:
        return sum(ratio.decision == "higher" for ratio in self.ratios)

    @property
    def one_sided(self) -> bool:
        return not (self.num_faster and self.num_slower)

    @property
    def is_decided(self) -> bool:
        return self.bounds is not None and not self.bounds[0] <= 1 <= self.bounds[1]


def attention_verdict(run: AttentionRun, peer: str | None) -> Verdict:
    name = figures.telling_pass(run.cells)
    told: list[str] = []
    if name is not None:
        comparisons = _comparisons(run.cells, peer, name)
        told += _speed_words(comparisons, peer, name) if peer and comparisons else _rate_words(run.cells, name)
    cautions = [*interruption(run, "cell"), *(_cautions(run.cells, name) if name else ())]
    return Verdict(sentences=(*told, *_failure_words(run.cells)), cautions=tuple(cautions))


def _comparisons(cells: Sequence[AttentionCell], peer: str | None, name: str) -> list[_Comparison]:
    peers, shapes = figures.peers_of(cells, peer), [cell.spec.shape for cell in cells]
    found = []
    for column in dict.fromkeys(cell.spec.column for cell in cells if cell.spec.column != peer):
        pairs = [
            (cell, peers[cell.spec.shape], value)
            for cell in cells
            if cell.spec.column == column and (value := figures.speed(cell, peers, name)) is not None
        ]
        if not pairs:
            continue
        slowest, _, _ = min(pairs, key=lambda pair: pair[2])
        found.append(
            _Comparison(
                column=column,
                ratios=tuple(figures.time_ratio(cell, theirs, name) for cell, theirs, _ in pairs),
                speeds=tuple(value for _, _, value in pairs),
                slowest_at=figures.shape_label(slowest.spec.shape, shapes),
                chose_peer=all(_chose(cell, theirs) for cell, theirs, _ in pairs),
            )
        )
    return sorted(found, key=lambda one: -one.mean)


def _chose(cell: AttentionCell, peer: AttentionCell) -> bool:
    chosen = f"auto is {peer.spec.implementation}: "
    return cell.spec.compile == peer.spec.compile and any(note.startswith(chosen) for note in cell.notes)


def _speed_words(comparisons: Sequence[_Comparison], peer: str, name: str) -> Iterator[str]:
    others = [one for one in comparisons if not one.chose_peer]
    decided = [one for one in others if one.one_sided and one.is_decided][:_MOST_TOLD]
    undecided = [one for one in others if one.one_sided and not one.is_decided]
    mixed = [one for one in others if not one.one_sided]
    if decided:
        first, *further = decided
        yield (
            f"{_called(first.column)} is {_with_error(first)} as fast as {_called(peer)} in {PASS_WORDS[name]}"
            + "".join(f"; {_called(one.column)} {_with_error(one)}" for one in further)
            + f": {_over(decided)}."
        )
    for one in undecided[: max(_MOST_TOLD - len(decided), 1)]:
        yield (
            f"Not decided whether {_called(one.column)} is faster than {_called(peer)} in {PASS_WORDS[name]}: "
            f"{_with_error(one)}, {_over([one])}."
        )
    for one in mixed[: max(_MOST_TOLD - len(decided) - len(undecided), 1)]:
        rest = len(one.speeds) - one.num_faster - one.num_slower
        yield (
            f"{_called(one.column)} is faster than {_called(peer)} on {one.num_faster} of {len(one.speeds)} shapes and "
            f"slower on {one.num_slower}{f' (neither on {rest})' if rest else ''}: {_times(min(one.speeds))} "
            f"(at {one.slowest_at}) to {_times(max(one.speeds))} in {PASS_WORDS[name]}."
        )
    for one in comparisons:
        if one.chose_peer:
            yield f"{one.column} chose {_called(peer)} on every shape: their times differ by the choosing, or by noise."


def _over(comparisons: Sequence[_Comparison]) -> str:
    counts, s = {len(one.speeds) for one in comparisons}, "s" if len(comparisons) > 1 else ""
    interval = f", 95 % interval{s}" if any(one.bounds for one in comparisons) else ""
    if max(counts) == 1:
        return f"at 1 shape{interval}"
    shapes = units.counted(max(counts), "shape") if len(counts) == 1 else "the shapes that both kernels ran"
    return f"geometric mean{s} of {shapes}{interval}"


def _with_error(one: _Comparison) -> str:
    if one.bounds is None:
        return _times(one.mean)
    low, high = one.bounds
    off = max(high - one.mean, one.mean - low, 0.01)
    if len(one.speeds) == 1 or off > _WIDE * one.mean:
        return f"{_times(one.mean)} ({_times(low)} to {_times(high)})"
    return f"{_times(one.mean)} ± {off:.2f}"


def _rate_words(cells: Sequence[AttentionCell], name: str) -> Iterator[str]:
    shapes = [cell.spec.shape for cell in cells]
    for column in list(dict.fromkeys(cell.spec.column for cell in cells))[:_MOST_TOLD]:
        rates = [(rate, cell) for cell in cells if cell.spec.column == column and (rate := cell.flops_per_s(name))]
        if not rates:
            continue
        fastest, best = max(rates, key=lambda pair: pair[0])
        least = units.format_rate(min(rate for rate, _ in rates), "FLOP/s")
        most = units.format_rate(fastest, "FLOP/s")
        between = most if len(rates) == 1 else f"{least} to {most}"
        yield (
            f"{_called(column)} computes {PASS_WORDS[name]} at {between}"
            f"{'' if len(rates) == 1 else ', the most'} at {figures.shape_label(best.spec.shape, shapes)}."
        )


def _failure_words(cells: Sequence[AttentionCell]) -> Iterator[str]:
    absent = Counter(package for cell in cells if (package := _absent_package(cell)))
    for package, number in absent.items():
        yield f"{package} is not installed: {units.counted(number, 'cell')} {'was' if number == 1 else 'were'} not run."
    failed = [cell for cell in cells if cell.failure and not _absent_package(cell)]
    if not failed:
        return
    no_memory = list(dict.fromkeys(c.spec.column for c in failed if c.failure and c.failure.kind == "out_of_memory"))
    count = f"{len(failed)} of {units.counted(len(cells), 'cell')}"
    if no_memory and all(c.failure and c.failure.kind == "out_of_memory" for c in failed):
        yield f"{', '.join(map(_called, no_memory))} ran out of memory in {count}."
    else:
        yield f"{count} failed" + (f", some of them out of memory ({', '.join(no_memory)})." if no_memory else ".")


def _absent_package(cell: AttentionCell) -> str | None:
    found = _ABSENT.search(cell.failure.message) if cell.failure else None
    return found[1] if found else None


def _cautions(cells: Sequence[AttentionCell], name: str) -> Iterator[str]:
    timed = [cell for cell in cells if cell.samples(name)]
    noisy = [cell for cell in timed if figures.scatters(cell, name)]
    if noisy:
        yield (
            f"Warning: in {len(noisy)} of {units.counted(len(timed), 'timed cell')} the middle half of the samples "
            f"spans more than {units.format_limit(SCATTERED)} of the median; those medians are marked ~."
        )


def _called(column: str) -> str:
    known = {"sdpa_flash", "sdpa_cudnn"}
    if column not in known:
        return column
    about = implementation(column).summary.removeprefix("torch's ").removesuffix("'s")
    return f"{about} ({column})"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"


_SYMBOLS = "B batch, H heads, G heads of keys and values, S queries, K keys, D dimension, e bytes per element"


def _title(run: AttentionRun) -> str:
    told = run.study.description or run.study.name
    return f"{told[:1].upper()}{told[1:]}" if told.lower().startswith("attention") else f"Attention: {told}"


def attention_cell_line(cell: AttentionCell) -> str:
    times = [f"{name} {units.format_time(seconds)}" for name in PASSES if (seconds := cell.median_s(name)) is not None]
    failed = [why_failed(cell.failure)] if cell.failure else []
    return f"{cell.spec.label} {cell.spec.column}: {', '.join(times + failed)}"


def _sections(run: AttentionRun, peer: str | None) -> Iterator[Section]:
    if means := figures.mean_speeds(run.cells, peer):
        yield Section.of("Mean speed", means)
    telling = figures.telling_pass(run.cells)
    if telling and (speeds := figures.speed_table(run.cells, peer, telling)):
        yield Section.of(f"Speed, {PASS_WORDS[telling]}", speeds)
    if telling:
        yield Section.of(f"FLOP/s, {PASS_WORDS[telling]}", *rate_charts(run.cells, telling, run.device_name))
    others = (rate_charts(run.cells, name, run.device_name) for name in PASSES if name != telling)
    yield Section.of("FLOP/s of the other passes", *chain.from_iterable(others), folded=True)
    for saved, title in ((True, "Memory saved for backward"), (False, "Peak memory")):
        yield Section.of(title, *memory_charts(run.cells, saved))
    yield from figures.cell_tables(run.cells, peer)
    yield Section.notes([*run.notes, *figures.notes_of(run.cells)])


def account_document(account: AttentionAccount) -> Document:
    total, memory = account.total_bytes, account.memory_bytes
    saved = sum(term.num_bytes for term in account.terms if term.kept)
    held = f"{units.format_bytes(total)} in {len(account.terms)} tensors"
    room = f"{units.format_bytes(memory)} of {account.memory_source}"
    answer = f"{account.spec.label} needs {held}, {units.format_bytes(total - memory)} more than the {room}."
    if total <= memory:
        answer = f"{account.spec.label} needs {held}. CUDA, libraries and gaps take a part of the {room}."
    told = [f"The peak is {account.moment}. {_SYMBOLS}.", f"{units.format_bytes(saved)} of it is saved for backward."]
    if account.previous and account.previous_bytes is not None:
        told.append(f"{account.previous.label} needs {units.format_bytes(account.previous_bytes)}, and fits.")
    if account.measured:
        told.append(f"The device's error was: {account.measured.message}.")
    title = f"The smallest plain attention that does not fit: {account.spec.label}"
    if account.asked:
        title = f"Plain attention of {account.asked.label} fits; its sequence doubled until it does not: "
        title += account.spec.label
    table = figures.account_table(account)
    return Document(
        title=title,
        verdict=Verdict(sentences=(answer,)),
        sections=(Section.of("", table, Sentences.of(told, "finding")),),
        data=table.rows,
    )


def _tiles(cells: Sequence[AttentionCell], peer: str | None) -> Iterator[Fact]:
    if name := figures.telling_pass(cells):
        passes = PASS_WORDS[name]
        yield from extremes(
            figures.attention_rows(cells, peer),
            ("column", "shape"),
            (f"{name}_speed", max, TIMES, f"largest speed-up over {peer}, {passes}"),
            (f"{name}_flops_per_s", max, FLOPS_PER_S, f"fastest, {passes}"),
            (f"{name}_peak_bytes", max, BYTES, "largest peak memory"),
            ("output_error_ratio", max, TIMES, "largest error of the output, over plain attention's"),
        )


def report_against(peer: str | None) -> RecordReport:
    """Report an attention benchmark relative to `peer`; None: the first measured of sdpa_flash, sdpa and plain."""

    def against(run: AttentionRun) -> str | None:
        return peer or figures.default_peer(run.cells)

    return RecordReport(
        chapter="Attention",
        anchor="attention",
        title=_title,
        subtitle=lambda run: dotted(made(run, "benchmark"), run.device_name, quoted_name(run)),
        called=lambda run: run.name or run.study.name,
        answer=lambda run: attention_verdict(run, against(run)),
        sections=lambda run: _sections(run, against(run)),
        tiles=lambda run: _tiles(run.cells, against(run)),
        rows=lambda run: figures.attention_rows(run.cells, against(run)),
    )


REPORT = report_against(None)
