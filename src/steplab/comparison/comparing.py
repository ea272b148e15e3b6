"""Compares two sets of records, cell by cell and figure by figure; the entry point of this package."""

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from steplab.comparison.differences import kernel_changes, memory_changes
from steplab.comparison.judging import start_margin
from steplab.comparison.likeness import unlike, whole_key
from steplab.comparison.samples import FEWEST, compare_samples, compare_values
from steplab.comparison.turns import ratio_in_turns, took_turns
from steplab.errors import Inconclusive, UserError
from steplab.records.comparison import ComparedFigure, Comparison, KernelChange, MemoryChange, Ratio, Side
from steplab.records.disturbances import disturbances
from steplab.records.measured import MeasuredCell, MeasuredFigure
from steplab.records.record import Record
from steplab.records.registry import kind_of
from steplab.records.rows import Row, Scalar
from steplab.records.run import Run
from steplab.units import counted

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cell:
    """Everything of one side that is alike."""

    key: Row
    label: str
    records: list[Record] = field(default_factory=list)
    measured: list[MeasuredCell] = field(default_factory=list)

    @property
    def good(self) -> list[MeasuredCell]:
        """The measurements that did not fail."""
        return [cell for cell in self.measured if cell.failure is None]

    @property
    def failure(self) -> str | None:
        """Why none of them succeeded; None if one did."""
        return None if self.good else self.measured[0].failure

    @property
    def runs(self) -> list[Run]:
        """The records that are runs, the newest last."""
        return sorted((r for r in self.records if isinstance(r, Run)), key=lambda run: run.created_utc)

    @property
    def figures(self) -> tuple[MeasuredFigure, ...]:
        """Those of the first measurement that did not fail."""
        return self.good[0].figures if self.good else ()

    def newest(self, what: Callable[[Run], _T | None]) -> _T | None:
        """What the newest run that has it has."""
        return next((found for run in reversed(self.runs) if (found := what(run))), None)

    def like(self, first: MeasuredFigure) -> list[MeasuredFigure]:
        """The same figure of each measurement that has it; a phase and a category of kernels may have one name."""
        told = (first.group, first.name)
        return [figure for cell in self.good for figure in cell.figures if (figure.group, figure.name) == told]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """A cell of A, and the one of B that is like it."""

    label: str
    """The words that distinguish it from other pairs; empty for the only one."""
    a: _Cell
    b: _Cell

    @property
    def sides(self) -> tuple[tuple[str, _Cell], ...]:
        """Both cells with the names of their sides."""
        return ("A", self.a), ("B", self.b)

    @property
    def in_turns(self) -> tuple[Run, Run] | None:
        """The runs of both, if they are one each and took turns with each other."""
        if len(self.a.runs) != 1 or len(self.b.runs) != 1 or not took_turns(self.a.runs[0], self.b.runs[0]):
            return None
        return self.a.runs[0], self.b.runs[0]

    @property
    def doubts(self) -> list[str]:
        """Why a difference of times may be the machine's; nothing for enough processes of each, which tell by
        themselves how much they differ, and nothing for runs in turns, which the machine disturbs alike."""
        if min(len(self.a.good), len(self.b.good)) >= FEWEST or self.in_turns:
            return []
        return [
            f"{side} ({run.id}): {disturbance.text}"
            for side, cell in self.sides
            for run in cell.runs
            for disturbance in disturbances(run)
        ]


_Cells = dict[frozenset[tuple[str, Scalar]], _Cell]
"""The cells of one side by what they must have in common with the other side's."""


def compare(
    a: Side,
    b: Side,
    records_a: Sequence[Record],
    records_b: Sequence[Record],
    *,
    threshold: float | None = None,
    allow: Collection[str] = (),
) -> Comparison:
    """How the records of B differ from those of A.

    Like records of one side count as several processes of it. `allow` names fields that may differ. `threshold` is the
    smallest difference that matters, as a share; None: the defaults of comparison.samples.

    Raises Inconclusive, naming the fields, if no cell of A is like one of B, and UserError for records that are never
    compared and for a field in `allow` that neither has or that would mix cells of one side.
    """
    cells_a, cells_b = _cells(a, records_a, allow), _cells(b, records_b, allow)
    _refuse_unknown(allow, [cell.key for cell in (*cells_a.values(), *cells_b.values())])
    several = max(len(cells_a), len(cells_b)) > 1
    pairs = [
        _Pair(label=cell.label if several else "", a=cell, b=cells_b[key])
        for key, cell in cells_a.items()
        if key in cells_b
    ]
    if not pairs:
        raise Inconclusive(_why_unlike(a, b, cells_a, cells_b, allow))
    num_decided = max(1, sum(_may_alarm(figure) for pair in pairs for figure in pair.a.figures))
    allowed = {found.field: found for pair in pairs for found in unlike(pair.a.key, pair.b.key)}
    return Comparison(
        a=a,
        b=b,
        figures=tuple(compared for pair in pairs for compared in _figures(pair, threshold, num_decided)),
        kernels=tuple(change for pair in pairs for change in _kernels(pair)),
        memory=tuple(change for pair in pairs for change in _memory(pair)),
        allowed=tuple(allowed.values()),
        failed=tuple(
            f"{pair.label or 'B'} failed: {pair.b.failure}" for pair in pairs if pair.b.failure and not pair.a.failure
        ),
        in_turns=any(pair.in_turns for pair in pairs),
        can_run_again=all(isinstance(record, Run) and record.spec for record in (*records_a, *records_b)),
        doubts=tuple(dict.fromkeys(doubt for pair in pairs for doubt in pair.doubts)),
        notes=tuple(_notes(cells_a, cells_b, pairs)),
    )


def _cells(side: Side, records: Sequence[Record], allow: Collection[str]) -> _Cells:
    """The cells of one side by what they must have in common with the other side's."""
    found: _Cells = {}
    for record in records:
        kind = kind_of(record)
        if kind.cells is None:
            raise UserError(f"{kind.plural} are not compared; `steplab show` and `steplab report` show them")
        for measured in kind.cells(record):
            key = whole_key(record, measured)
            shared = frozenset((name, value) for name, value in key.items() if name not in allow and value is not None)
            cell = found.setdefault(shared, _Cell(key=key, label=measured.label))
            if mixed := unlike(cell.key, key):
                names = ", ".join(each.field for each in mixed)
                raise UserError(
                    f"'{side.told}' has several cells that differ in nothing but {names}, which --allow leaves out; "
                    "name one of its records by its id"
                )
            cell.records.append(record)
            cell.measured.append(measured)
    return found


def _refuse_unknown(allow: Collection[str], keys: Sequence[Row]) -> None:
    """Raise UserError for a name that is no field; a variable of the environment may be set on neither side."""
    fields = dict.fromkeys(name for key in keys for name in key)
    for name in allow:
        if name not in fields and not name.isupper():
            alike = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {alike[0]}?" if alike else f"choose one of {', '.join(fields)}"
            raise UserError(f"--allow {name}: no such field; {hint}")


def _why_unlike(a: Side, b: Side, cells_a: _Cells, cells_b: _Cells, allow: Collection[str]) -> str:
    """The fields in which the two cells that are most alike differ."""
    pairs = [unlike(x.key, y.key, allow) for x in cells_a.values() for y in cells_b.values()]
    if not pairs:
        return f"'{a.told if not cells_a else b.told}' has nothing that can be compared"
    least = min(pairs, key=len)
    fields = "; ".join(f"{each.field}: {_told(each.a)} in A, {_told(each.b)} in B" for each in least)
    what = "they differ" if len(pairs) == 1 else "even the two cells most alike differ"
    options = " ".join(f"--allow {each.field}" for each in least)
    return f"A and B are not alike: {what} in {fields}; to compare them all the same, add {options}"


def _told(value: Scalar) -> str:
    return "not known" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _may_alarm(figure: MeasuredFigure) -> bool:
    """Whether a comparison is decided by samples of the figure, which may raise a false alarm; bytes are exact."""
    return figure.decides and figure.unit != "bytes"


def _figures(pair: _Pair, threshold: float | None, num_decided: int) -> Iterator[ComparedFigure]:
    """The figures that both cells have."""
    for first in pair.a.figures:
        a, b = ([figure.samples for figure in cell.like(first)] for _, cell in pair.sides)
        if not b:
            continue
        ratio = _ratio(pair, first, a, b, threshold, num_decided if _may_alarm(first) else 1)
        yield ComparedFigure(
            cell=pair.label,
            name=first.name,
            group=first.group,
            unit=first.unit,
            decides=first.decides,
            a=_middle(a, first),
            b=_middle(b, first),
            ratio=ratio,
        )


def _ratio(
    pair: _Pair,
    figure: MeasuredFigure,
    a: list[tuple[float, ...]],
    b: list[tuple[float, ...]],
    threshold: float | None,
    num_decided: int,
) -> Ratio | None:
    """What can be said of the ratio: of runs in turns that of a sample of each step; else bytes are exact, and a few
    single times have no interval."""
    if (runs := pair.in_turns) and all(a[0]) and all(b[0]):
        each_step = all(run.turns and len(of[0]) == run.turns.num_steps for run, of in zip(runs, (a, b), strict=True))
        if each_step and (found := ratio_in_turns(*runs, a[0], b[0], threshold=threshold, num_decided=num_decided)):
            return found
    if figure.unit == "bytes":
        before, after = _middle(a, figure), _middle(b, figure)
        return compare_values(before, after, threshold=threshold) if before > 0 and after > 0 else None
    count = min(sum(map(len, blocks)) for blocks in (a, b))
    single = max(map(len, (*a, *b))) == 1
    if (single and count < FEWEST) or not all(all(block) for block in (*a, *b)):
        return None
    margin = start_margin([run for _, cell in pair.sides for run in cell.runs])
    return compare_samples(a, b, in_turns=False, threshold=threshold, num_decided=num_decided, margin=margin)


def _middle(blocks: Sequence[Sequence[float]], figure: MeasuredFigure) -> float:
    """The median; of what is made of step times, such as tokens per second, the value at the median step."""
    samples = [sample for block in blocks for sample in block]
    if figure.group == "speed" and all(samples):
        return 1 / median(1 / sample for sample in samples)
    return median(samples)


def _kernels(pair: _Pair) -> tuple[KernelChange, ...]:
    """Changes between the newest profiles of both."""
    a, b = (cell.newest(lambda run: run.profile) for _, cell in pair.sides)
    return kernel_changes(a, b, cell=pair.label) if a and b else ()


def _memory(pair: _Pair) -> tuple[MemoryChange, ...]:
    """Changes between the newest memory profiles of both."""
    a, b = (cell.newest(lambda run: run.memory_profile) for _, cell in pair.sides)
    return memory_changes(a, b, cell=pair.label) if a and b else ()


def _notes(cells_a: _Cells, cells_b: _Cells, pairs: Sequence[_Pair]) -> Iterator[str]:
    """Cells that one side alone has, cells without figures, and failures beside what is compared."""
    for side, own, other in (("A", cells_a, cells_b), ("B", cells_b, cells_a)):
        if alone := [cell.label for key, cell in own.items() if key not in other]:
            yield f"In {side} alone, and not compared: {'; '.join(alone)}."
    for pair in pairs:
        if pair.a.failure:
            both = " So did B." if pair.b.failure else ""
            yield f"{pair.label or 'A'} failed in A: {pair.a.failure}.{both}"
        for side, cell in pair.sides:
            failures = [measured.failure for measured in cell.measured if measured.failure is not None]
            if failures and cell.good:
                label = f"{pair.label}: " if pair.label else ""
                yield (
                    f"{label}{len(failures)} of {counted(len(cell.measured), 'record')} failed in {side}, and only the "
                    f"others are compared: {failures[-1]}."
                )
