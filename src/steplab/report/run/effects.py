"""Compares each setting with its baseline, over otherwise equal runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from steplab import units
from steplab.comparison.turns import judged, of_starts, took_turns
from steplab.records.comparison import Decision, Ratio
from steplab.records.disturbances import never_settles
from steplab.records.rows import Scalar
from steplab.report.kit.document import MOST_ROWS, Bar, Bars, Column, Segment, Table
from steplab.report.kit.grouping import grouped
from steplab.report.kit.quantities import TIMES
from steplab.report.run.cells import COMPARED, RunCell, label, said, varying
from steplab.specs.step import STEP_FIELDS

_BASELINES = tuple((field.column, field.about.baseline) for field in STEP_FIELDS if field.about.baseline is not None)


_COLOR_OF_ONE_PAIR = 7

VERBS: dict[Decision, str] = {"undecided": "undecided", "not higher": "not slower", "same": "no difference"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A comparison of two cells that differ in one field only."""

    starts: tuple[tuple[RunCell, RunCell], ...]
    """(Baseline cell, other cell) for each start of their processes; `ab --starts` starts them several times."""
    judged: Ratio
    """Ratio of step times, after / before, over all starts (comparison.turns)."""

    @property
    def before(self) -> RunCell:
        return self.starts[-1][0]

    @property
    def after(self) -> RunCell:
        return self.starts[-1][1]

    @property
    def ratio(self) -> float:
        """Speed-up: time before / time after."""
        return 1 / self.judged.ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of `ratio`; None with too few samples."""
        low, high = self.judged.low, self.judged.high
        return (1 / high, 1 / low) if low and high else None

    @property
    def decision(self) -> Decision:
        return self.judged.decision


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    field: str
    choice: str
    pairs: tuple[Pair, ...]

    @property
    def faster(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.decision == "lower"]

    @property
    def slower(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.decision == "higher"]

    @property
    def is_negligible(self) -> bool:
        """True if no pair differs more than repeated processes of one step do."""
        return all(pair.decision == "same" for pair in self.pairs)


def effects_of(cells: Sequence[RunCell]) -> Iterator[Effect]:
    for field, baseline in _BASELINES:
        present = list(dict.fromkeys(c.values[field] for c in cells if c.values[field] is not None))
        base = baseline if baseline in present else present[0] if present else None
        for value in present:
            pairs = _pairs(cells, field, base, value) if value != base else []
            if pairs:
                choice = f"{said(field, value)} instead of {said(field, base)}"
                yield Effect(field=field, choice=choice, pairs=tuple(pairs))


def _pairs(cells: Sequence[RunCell], field: str, base: Scalar, value: Scalar) -> list[Pair]:
    def rest(cell: RunCell) -> tuple[Scalar, ...]:
        return tuple(cell.values[name] for name in COMPARED if name not in (field, "repeat"))

    before = grouped((cell for cell in cells if cell.values[field] == base), rest)
    pairs, in_turns = list[Pair](), list[Pair]()
    for cell in cells:
        if cell.values[field] == value and (others := before.get(rest(cell))):
            beside = [other for other in others if took_turns(other.run, cell.run)]
            alike = [other for other in others if other.values["repeat"] == cell.values["repeat"]]
            for other in (beside or alike)[-1:]:
                if ratio := judged(other.run, cell.run):
                    (in_turns if beside else pairs).append(Pair(starts=((other, cell),), judged=ratio))
    for each in grouped(in_turns, lambda pair: rest(pair.after)).values():
        both = tuple(pair.starts[0] for pair in each)
        pairs.append(Pair(starts=both, judged=of_starts([pair.judged for pair in each])))
    return sorted(pairs, key=lambda pair: pair.ratio)


def effect_words(effect: Effect) -> list[str]:
    told = _outcome(effect)
    if restless := sum(any(never_settles(cell.run) for cell in pair.starts[-1]) for pair in effect.pairs):
        where = f"In {restless} of {len(effect.pairs)} the" if len(effect.pairs) > 1 else "The"
        told[-1] += f" {where} step time did not settle."
    return told


def _outcome(effect: Effect) -> list[str]:
    others = varying([pair.before for pair in effect.pairs])
    least, most = effect.pairs[0], effect.pairs[-1]
    faster, slower, count = len(effect.faster), len(effect.slower), len(effect.pairs)
    if count == 1:
        verb = VERBS.get(most.decision) or speed_words(most.ratio)
        times = f"{units.format_time(most.judged.a)} to {units.format_time(most.judged.b)}"
        why = " Starts of one step differ as much there." if most.decision in ("undecided", "not higher") else ""
        return [f"{effect.choice}: {verb} at {label(most.before, others)} ({times}).{why}"]
    pairs_words = "both pairs" if count == 2 else f"all {count} pairs"
    ends = f"{times_words(least.ratio)} at {label(least.before, others)}"
    ends += f" to {times_words(most.ratio)} at {label(most.before, others)}"
    if faster == count:
        return [f"{effect.choice} is faster in {pairs_words} of otherwise equal runs: {ends}."]
    if slower == count:
        return [f"{effect.choice} does not pay: it is slower in {pairs_words} of otherwise equal runs, {ends}."]
    same = sum(pair.decision == "same" for pair in effect.pairs)
    if not faster and not slower and not same:
        return [f"{effect.choice}: undecided in {pairs_words} of otherwise equal runs."]
    told = f"{effect.choice} is faster in {faster} of {count} pairs of otherwise equal runs"
    if faster:
        most = effect.faster[-1]
        told += f", up to {times_words(most.ratio)} at {label(most.before, others)}"
    rest = []
    if slower:
        least = effect.slower[0]
        rest.append(f"it does not pay in {slower}: {times_words(least.ratio)} at {label(least.before, others)}")
    if same:
        rest.append(f"{same} {'does' if same == 1 else 'do'} not differ")
    if undecided := count - faster - slower - same:
        rest.append(f"{undecided} {'is' if undecided == 1 else 'are'} undecided")
    others_told = "; ".join(rest)
    return [f"{told}.", f"{others_told[0].upper()}{others_told[1:]}."]


def times_words(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 10 else f"{units.three_digits(ratio)}×"


def speed_words(ratio: float) -> str:
    """Example: '1.84× as fast', 'slower, 1.20× the time'."""
    return f"{times_words(ratio)} as fast" if ratio >= 1 else f"slower, {times_words(1 / ratio)} the time"


def effect_bars(cells: Sequence[RunCell]) -> Bars | None:
    """Draw the share of step time that each setting saves, largest first; losses extend left."""
    found = [(1 - 1 / median(pair.ratio for pair in effect.pairs), effect) for effect in effects_of(cells)]
    known = [(saved, effect) for saved, effect in found if effect.faster or effect.slower or effect.is_negligible]
    if not known:
        return None
    bars = tuple(map(_effect_bar, sorted(known, key=lambda one: -one[0])))
    single = " Grey: a single pair." if any(len(effect.pairs) == 1 for _, effect in known) else ""
    return Bars(
        bars=bars, note=f"Step time by choice: the median over pairs of runs that differ in nothing else.{single}"
    )


def _effect_bar(one: tuple[float, Effect]) -> Bar:
    saved, effect = one
    if effect.is_negligible:
        return Bar(label=effect.choice, figure=VERBS["same"])
    count = len(effect.pairs)
    same = sum(pair.decision == "same" for pair in effect.pairs)
    faster, slower = len(effect.faster), len(effect.slower)
    rest = {"slower": slower, "no difference": same, "undecided": count - faster - slower - same}
    told = [f"{faster} of {units.counted(count, 'pair')} faster", *(f"{n} {word}" for word, n in rest.items() if n)]
    color = _COLOR_OF_ONE_PAIR if count == 1 else 1 if saved > 0 else 2
    segment = Segment(value=saved, color=color, tip=" ".join(effect_words(effect)))
    figure = f"{units.format_percent(abs(saved))} {'less' if saved > 0 else 'more'} time"
    return Bar(label=effect.choice, figure=figure, segments=(segment,), detail=", ".join(told))


def effects_table(cells: Sequence[RunCell]) -> Table:
    order = {cell.id: place for place, cell in enumerate(cells)}
    choices: dict[int, str] = {}
    pairs = []
    for effect in effects_of(cells):
        choices |= {id(pair): effect.choice for pair in effect.pairs}
        pairs += sorted(effect.pairs, key=lambda pair: order[pair.before.id])
    fields = varying([pair.before for pair in pairs])
    caption = (
        "Median step times of runs that differ in nothing else; the speed-up is the time before over the time after, "
        "with its 95 % interval."
    )
    if any(pair.decision in VERBS for pair in pairs):
        caption += (
            " Undecided: the times differ by no more than starts of one step on such machines may. No difference: by "
            "less than 5 %, or in turns less than 1 %."
        )
    columns = (
        Column(key="choice", shared="{}", wraps_from=20, value=lambda pair: choices[id(pair)]),
        Column(key="run", wraps_from=16, value=lambda pair: label(pair.before, fields)),
        Column(key="before_s", header="before", value=lambda pair: pair.judged.a),
        Column(key="after_s", header="after", value=lambda pair: pair.judged.b),
        Column(key="ratio", header="speed-up", quantity=TIMES),
        Column(key="low", quantity=TIMES, rank=2, value=lambda pair: pair.interval and pair.interval[0]),
        Column(key="high", quantity=TIMES, rank=2, value=lambda pair: pair.interval and pair.interval[1]),
        Column(key="certain", header="doubt", rank=1, value=lambda pair: VERBS.get(pair.decision, "")),
        Column(key="before_bytes", header="peak before", rank=2, value=lambda pair: _peak_bytes(pair.before)),
        Column(key="after_bytes", header="peak after", rank=2, value=lambda pair: _peak_bytes(pair.after)),
        Column(key="bytes_ratio", header="peak ×", quantity=TIMES, rank=2, value=_bytes_ratio),
        Column(key="ids", header="records", rank=3, wraps_from=12, value=_ids),
    )
    return Table.of("choices", pairs, columns, caption, first=MOST_ROWS)


def _peak_bytes(cell: RunCell) -> int | None:
    return cell.run.peak.peak_allocated_bytes if cell.run.peak else None


def _bytes_ratio(pair: Pair) -> float | None:
    before, after = _peak_bytes(pair.before), _peak_bytes(pair.after)
    return after / before if before and after else None


def _ids(pair: Pair) -> str:
    return " ".join(cell.id for start in pair.starts for cell in start)
