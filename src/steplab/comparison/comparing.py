"""Compares two sets of records, cell by cell and figure by figure; the entry point of this package."""

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from steplab.comparison.differences import kernel_changes, memory_changes
from steplab.comparison.likeness import unlike, whole_key
from steplab.comparison.samples import FEWEST, compare_samples, compare_values
from steplab.comparison.turns import ratio_in_turns, took_turns
from steplab.errors import Inconclusive, UserError
from steplab.records.comparison import ComparedFigure, Comparison, KernelChange, MemoryChange, Ratio, Side, Unlike
from steplab.records.disturbances import disturbances
from steplab.records.measured import MeasuredCell, MeasuredFigure
from steplab.records.record import Record
from steplab.records.registry import kind_of
from steplab.records.rows import Row, Scalar
from steplab.records.run import Run
from steplab.units import counted


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

    def like(self, first: MeasuredFigure) -> list[MeasuredFigure]:
        """The same figure of each measurement that has it; a phase and a category of kernels may have one name."""
        told = (first.group, first.name)
        return [figure for cell in self.good for figure in cell.figures if (figure.group, figure.name) == told]


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
    pairs = [(cells_a[key], cells_b[key]) for key in cells_a if key in cells_b]
    if not pairs:
        raise Inconclusive(_why_unlike(a, b, cells_a, cells_b, allow))
    several = max(len(cells_a), len(cells_b)) > 1
    named = [(before.label if several else "", before, after) for before, after in pairs]
    doubts = [_doubts(before, after) for before, after in pairs]
    num_decided = max(1, sum(_may_alarm(figure) for before, _ in pairs for figure in _first_figures(before)))
    allowed: dict[str, Unlike] = {}
    for before, after in pairs:
        allowed |= {found.field: found for found in unlike(before.key, after.key)}
    return Comparison(
        a=a,
        b=b,
        figures=tuple(
            compared
            for (cell, before, after), doubtful in zip(named, doubts, strict=True)
            for compared in _figures(cell, before, after, threshold, num_decided, doubtful=bool(doubtful))
        ),
        kernels=tuple(change for cell, before, after in named for change in _kernels(cell, before, after)),
        memory=tuple(change for cell, before, after in named for change in _memory(cell, before, after)),
        allowed=tuple(allowed.values()),
        failed=tuple(
            f"{cell or 'B'} failed: {after.failure}"
            for cell, before, after in named
            if after.failure and not before.failure
        ),
        in_turns=any(_pair_in_turns(before, after) for before, after in pairs),
        can_run_again=all(isinstance(record, Run) and record.spec for record in (*records_a, *records_b)),
        doubts=tuple(dict.fromkeys(doubt for found in doubts for doubt in found)),
        notes=tuple(_notes(cells_a, cells_b, named)),
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


def _why_unlike(
    a: Side,
    b: Side,
    cells_a: _Cells,
    cells_b: _Cells,
    allow: Collection[str],
) -> str:
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


def _doubts(before: _Cell, after: _Cell) -> list[str]:
    """Why a difference between the times of two cells may be the machine's; nothing for enough processes of each, which
    tell by themselves how much they differ, and nothing for runs in turns, which the machine disturbs alike."""
    if min(len(before.good), len(after.good)) >= FEWEST or _pair_in_turns(before, after):
        return []
    return [
        f"{side} ({run.id}): {disturbance.text}"
        for side, cell in (("A", before), ("B", after))
        for run in cell.runs
        for disturbance in disturbances(run)
    ]


def _first_figures(cell: _Cell) -> tuple[MeasuredFigure, ...]:
    return cell.good[0].figures if cell.good else ()


def _may_alarm(figure: MeasuredFigure) -> bool:
    """Whether a comparison is decided by samples of the figure, which may raise a false alarm; bytes are exact."""
    return figure.decides and figure.unit != "bytes"


def _figures(
    cell: str, before: _Cell, after: _Cell, threshold: float | None, num_decided: int, *, doubtful: bool
) -> Iterator[ComparedFigure]:
    """The figures that both cells have."""
    for first in _first_figures(before):
        blocks_a = [figure.samples for figure in before.like(first)]
        blocks_b = [figure.samples for figure in after.like(first)]
        if not blocks_b:
            continue
        together = num_decided if _may_alarm(first) else 1
        ratio = _in_turns(before, after, blocks_a, blocks_b, threshold, together) or _ratio(
            first, blocks_a, blocks_b, threshold, together
        )
        if ratio and ratio.decision != "same" and doubtful and first.unit != "bytes":
            ratio = replace(ratio, decision="undecided", more=None)
        yield ComparedFigure(
            cell=cell,
            name=first.name,
            group=first.group,
            unit=first.unit,
            decides=first.decides,
            a=_middle(blocks_a),
            b=_middle(blocks_b),
            ratio=ratio,
        )


def _ratio(
    figure: MeasuredFigure,
    blocks_a: list[tuple[float, ...]],
    blocks_b: list[tuple[float, ...]],
    threshold: float | None,
    num_decided: int,
) -> Ratio | None:
    """What can be said of the ratio: bytes are exact, and a few single times have no interval."""
    if figure.unit == "bytes":
        a, b = _middle(blocks_a), _middle(blocks_b)
        return compare_values(a, b, threshold=threshold) if a > 0 and b > 0 else None
    count = min(sum(map(len, blocks)) for blocks in (blocks_a, blocks_b))
    single = max(map(len, (*blocks_a, *blocks_b))) == 1
    if (single and count < FEWEST) or not all(all(block) for block in (*blocks_a, *blocks_b)):
        return None
    return compare_samples(blocks_a, blocks_b, in_turns=False, threshold=threshold, num_decided=num_decided)


def _in_turns(
    before: _Cell,
    after: _Cell,
    blocks_a: list[tuple[float, ...]],
    blocks_b: list[tuple[float, ...]],
    threshold: float | None,
    num_decided: int,
) -> Ratio | None:
    """The ratio of the times of two runs that took turns with each other; None for others, and for single values."""
    pair = _pair_in_turns(before, after)
    if pair is None or not all(blocks_a[0]) or not all(blocks_b[0]):
        return None
    if any(
        len(blocks[0]) != run.turns.num_steps
        for run, blocks in zip(pair, (blocks_a, blocks_b), strict=True)
        if run.turns
    ):
        return None
    return ratio_in_turns(*pair, blocks_a[0], blocks_b[0], threshold=threshold, num_decided=num_decided)


def _pair_in_turns(before: _Cell, after: _Cell) -> tuple[Run, Run] | None:
    """The two runs of a pair of cells, if they took turns with each other."""
    if len(before.runs) != 1 or len(after.runs) != 1 or not took_turns(before.runs[0], after.runs[0]):
        return None
    return before.runs[0], after.runs[0]


def _middle(blocks: Sequence[Sequence[float]]) -> float:
    return median(sample for block in blocks for sample in block)


def _kernels(cell: str, before: _Cell, after: _Cell) -> Iterator[KernelChange]:
    """Changes between the newest profiles of both."""
    profiles = [next((run.profile for run in reversed(side.runs) if run.profile), None) for side in (before, after)]
    if profiles[0] and profiles[1]:
        yield from kernel_changes(profiles[0], profiles[1], cell=cell)


def _memory(cell: str, before: _Cell, after: _Cell) -> Iterator[MemoryChange]:
    """Changes between the newest memory profiles of both."""
    watched = [
        next((run.memory_profile for run in reversed(side.runs) if run.memory_profile), None)
        for side in (before, after)
    ]
    if watched[0] and watched[1]:
        yield from memory_changes(watched[0], watched[1], cell=cell)


def _notes(
    cells_a: _Cells,
    cells_b: _Cells,
    named: Sequence[tuple[str, _Cell, _Cell]],
) -> Iterator[str]:
    """Cells that one side alone has, cells without figures, and failures beside what is compared."""
    for side, own, other in (("A", cells_a, cells_b), ("B", cells_b, cells_a)):
        if alone := [cell.label for key, cell in own.items() if key not in other]:
            yield f"In {side} alone, and not compared: {'; '.join(alone)}."
    for cell, before, after in named:
        if before.failure:
            both = " So did B." if after.failure else ""
            yield f"{cell or 'A'} failed in A: {before.failure}.{both}"
        for side, one in (("A", before), ("B", after)):
            failures = [measured.failure for measured in one.measured if measured.failure is not None]
            if failures and one.good:
                label = f"{cell}: " if cell else ""
                yield (
                    f"{label}{len(failures)} of {counted(len(one.measured), 'record')} failed in {side}, and only the "
                    f"others are compared: {failures[-1]}."
                )
