"""Compares two sets of records by cell and figure; the package's entry point.

Two records are comparable if their cells and conditions match in every field. Time differences are also split by part
of the model, memory differences by tensor.
"""

import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from steplab.comparison.samples import FEWEST, compare_samples, compare_values
from steplab.comparison.turns import of_starts, ratio_in_turns, start_margin, took_turns
from steplab.errors import Inconclusive, UserError, meant
from steplab.records import comparison as result
from steplab.records.disturbances import disturbances
from steplab.records.environment import Environment
from steplab.records.figure import MeasuredCell, MeasuredFigure
from steplab.records.memory_profile import Allocation, MemoryProfile
from steplab.records.module_names import without_numbers
from steplab.records.profile import Profile
from steplab.records.record import Record
from steplab.records.registry import kind_of
from steplab.records.rows import Row, Scalar
from steplab.records.run import Run
from steplab.units import counted, listed

_SELECTS = ("CUDA_VISIBLE_DEVICES",)


def conditions(record: Record) -> Row:
    """Conditions of a comparison, which must match: kind, device and versions, but not commits."""
    found: Row = {"kind": kind_of(record).name, "device": record.device_name, "steplab": record.steplab_version}
    if isinstance(record, Run) and record.profile and record.timing is None:
        found["source"] = record.profile.source
    env = record.environment
    if env is None:
        return found
    device = env.device
    found |= {"threads": device.threads, "power_limit_w": device.power_limit_w, "cpu": env.cpu, "host": env.host}
    found |= {name: getattr(env, name) for name in ("python", "torch", "cuda", "cudnn", "triton", "driver")}
    return found | {name: value for name, value in env.variables.items() if name not in _SELECTS}


def whole_key(record: Record, cell: MeasuredCell) -> Row:
    attention = cell.key.get("attention", cell.key.get("implementation"))
    kernels = _flash_triton(record.environment) if attention in ("flash_triton", "auto") else {}
    return conditions(record) | kernels | cell.key


def _flash_triton(env: Environment | None) -> Row:
    """The kernels that flash_triton launched, as a condition. Older records do not name them: with Triton 3.6 on a
    Hopper they were Hopper's, else the portable ones."""
    if env is None or env.device.kind != "cuda" or env.triton is None:
        return {}
    had_hopper = env.device.compute_capability == "9.0" and env.triton.startswith("3.6.")
    return {"flash_triton kernels": env.flash_triton or ("hopper" if had_hopper else "portable")}


def unlike(
    a: Mapping[str, Scalar], b: Mapping[str, Scalar], allowed: Collection[str] = ()
) -> tuple[result.Unlike, ...]:
    names = dict.fromkeys((*a, *b))
    return tuple(
        result.Unlike(field=name, a=a.get(name), b=b.get(name))
        for name in names
        if name not in allowed and a.get(name) != b.get(name)
    )


_MOST = 12
_NOTICEABLE_TIME = 0.005
_NOTICEABLE_BYTES = 0.001

_Group = tuple[str, str, tuple[int, ...] | None]
_Part = tuple[str, str, str]
"""Phase, range and category of kernels; either range or category is empty."""


def _kernel_changes(a: Profile, b: Profile, cell: str) -> tuple[result.KernelChange, ...]:
    """Differences of GPU time by phase and range, largest first; by kernel category if a profile lacks ranges."""
    by_range = all(any(kernel.range for kernel in profile.kernels) for profile in (a, b))
    before, after = _parts(a, by_range=by_range), _parts(b, by_range=by_range)
    least_s = _NOTICEABLE_TIME * a.busy_s / a.num_steps
    found = [
        result.KernelChange(
            cell=cell,
            phase=phase,
            range=range_,
            category=category,
            a=before.get((phase, range_, category), ()),
            b=after.get((phase, range_, category), ()),
        )
        for phase, range_, category in dict.fromkeys((*before, *after))
    ]
    changed = [change for change in found if abs(change.b_s - change.a_s) >= least_s]
    return tuple(sorted(changed, key=lambda change: -abs(change.b_s - change.a_s))[:_MOST])


def _parts(profile: Profile, *, by_range: bool) -> dict[_Part, tuple[result.KernelCount, ...]]:
    calls: dict[_Part, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for kernel in profile.kernels:
        part = (kernel.phase, kernel.range, "") if by_range else (kernel.phase, "", kernel.category)
        counted = calls[part][kernel.name]
        counted[0] += kernel.calls / profile.num_steps
        counted[1] += kernel.total_s / profile.num_steps
    return {
        part: tuple(
            result.KernelCount(name=name, calls=number, time_s=time_s)
            for name, (number, time_s) in sorted(kernels.items(), key=lambda item: -item[1][1])
        )
        for part, kernels in calls.items()
    }


def _memory_changes(a: MemoryProfile, b: MemoryProfile, cell: str) -> tuple[result.MemoryChange, ...]:
    """Differences of bytes at the memory peak by category, module and shape of tensors, largest first.

    Records hold only the largest allocations, so small ones may be missing.
    """
    before, after = _groups(a.largest), _groups(b.largest)
    least = _NOTICEABLE_BYTES * max(a.peak_bytes, b.peak_bytes)
    found = []
    for group in dict.fromkeys((*before, *after)):
        category, module, shape = group
        change = result.MemoryChange(
            cell=cell,
            category=category,
            module=module,
            op=_op(after.get(group) or before[group]),
            shape=shape,
            a=_by_dtype(before.get(group, ())),
            b=_by_dtype(after.get(group, ())),
        )
        if abs(change.change_bytes) >= least:
            found.append(change)
    return tuple(sorted(found, key=lambda change: -abs(change.change_bytes))[:_MOST])


def _groups(allocations: Iterable[Allocation]) -> dict[_Group, list[Allocation]]:
    found: dict[_Group, list[Allocation]] = defaultdict(list)
    for made in allocations:
        if made.at_peak:
            found[made.category, without_numbers(made.module or ""), made.shape].append(made)
    return found


def _by_dtype(allocations: Iterable[Allocation]) -> tuple[result.TensorBytes, ...]:
    held: dict[str | None, int] = defaultdict(int)
    for made in allocations:
        held[made.dtype] += made.block_bytes * made.count
    return tuple(result.TensorBytes(dtype=dtype, num_bytes=held[dtype]) for dtype in sorted(held, key=str))


def _op(allocations: list[Allocation]) -> str:
    return max(allocations, key=lambda made: made.block_bytes * made.count).op or ""


_T = TypeVar("_T")
_Samples = list[tuple[str, tuple[float, ...]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cell:
    key: Row
    label: str
    measured: list[tuple[Record, MeasuredCell]] = field(default_factory=list)

    @property
    def good(self) -> list[tuple[Record, MeasuredCell]]:
        return [(record, cell) for record, cell in self.measured if cell.failure is None]

    @property
    def failures(self) -> list[str]:
        return [cell.failure for _, cell in self.measured if cell.failure is not None]

    @property
    def failure(self) -> str | None:
        return None if self.good else self.failures[0]

    @property
    def runs(self) -> list[Run]:
        return sorted(
            (record for record, _ in self.measured if isinstance(record, Run)), key=lambda run: run.created_utc
        )

    @property
    def figures(self) -> tuple[MeasuredFigure, ...]:
        return self.good[0][1].figures if self.good else ()

    def newest(self, what: Callable[[Run], _T | None]) -> _T | None:
        return next((found for run in reversed(self.runs) if (found := what(run))), None)

    def samples(self, first: MeasuredFigure) -> _Samples:
        """Record id and samples of this figure in each successful record. A phase and a kernel category may share a
        name."""
        told = (first.group, first.name)
        return [
            (record.id, figure.samples)
            for record, cell in self.good
            for figure in cell.figures
            if (figure.group, figure.name) == told
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    label: str
    a: _Cell
    b: _Cell

    @property
    def sides(self) -> tuple[tuple[str, _Cell], ...]:
        return ("A", self.a), ("B", self.b)

    @property
    def in_turns(self) -> list[tuple[Run, Run]]:
        """Pairs of runs that alternated, one pair per start of their processes; empty unless every run is in a pair."""
        starts = [(a, b) for a in self.a.runs for b in self.b.runs if took_turns(a, b)]
        return starts if len(starts) == len(self.a.runs) == len(self.b.runs) else []

    @property
    def doubts(self) -> list[str]:
        """Disturbances that may explain a difference of times, with the runs. Empty for alternating runs, which share
        them, and with enough processes per side, which show their own spread."""
        if min(len(self.a.good), len(self.b.good)) >= FEWEST or self.in_turns:
            return []
        found: dict[str, list[str]] = {}
        for side, cell in self.sides:
            for run in cell.runs:
                for disturbance in disturbances(run):
                    found.setdefault(disturbance.text, []).append(f"{side} ({run.id})")
        return [f"{listed(runs)}: {text}" for text, runs in found.items()]


_Cells = dict[frozenset[tuple[str, Scalar]], _Cell]


def compare(
    a: result.Side,
    b: result.Side,
    records_a: Sequence[Record],
    records_b: Sequence[Record],
    *,
    threshold: float | None = None,
    allow: Collection[str] = (),
) -> result.Comparison:
    """Compare two sets of records. Several matching records of one side count as its processes.

    `allow` names fields that may differ. `threshold` is the smallest difference that matters, as a fraction; None: the
    defaults of comparison.samples.

    Raises Inconclusive, with the fields, if no cells match. Raises UserError for kinds that are not comparable, and for
    an allowed field that is absent or would mix cells of one side.
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
    return result.Comparison(
        a=a,
        b=b,
        figures=tuple(compared for pair in pairs for compared in _figures(pair, threshold, num_decided)),
        kernels=tuple(change for pair in pairs for change in _kernels(pair)),
        memory=tuple(change for pair in pairs for change in _memory(pair)),
        allowed=tuple(allowed.values()),
        failed=tuple(
            f"{pair.label or 'B'} failed: {pair.b.failure}" for pair in pairs if pair.b.failure and not pair.a.failure
        ),
        in_turns=any(bool(pair.in_turns) for pair in pairs),
        can_run_again=all(isinstance(record, Run) and record.spec for record in (*records_a, *records_b)),
        doubts=tuple(dict.fromkeys(doubt for pair in pairs for doubt in pair.doubts)),
        notes=tuple(_notes(cells_a, cells_b, pairs)),
    )


def _cells(side: result.Side, records: Sequence[Record], allow: Collection[str]) -> _Cells:
    found: _Cells = {}
    for record in records:
        kind = kind_of(record)
        if kind.cells is None:
            raise UserError(f"{kind.plural} cannot be compared; use `steplab show` or `steplab report`")
        for measured in kind.cells(record):
            key = whole_key(record, measured)
            shared = frozenset((name, value) for name, value in key.items() if name not in allow and value is not None)
            cell = found.setdefault(shared, _Cell(key=key, label=measured.label))
            if mixed := unlike(cell.key, key):
                names = ", ".join(each.field for each in mixed)
                raise UserError(
                    f"'{side.told}' has several cells that differ only in {names}, which --allow ignores; "
                    "pass the id of one record"
                )
            cell.measured.append((record, measured))
    return found


def _refuse_unknown(allow: Collection[str], keys: Sequence[Row]) -> None:
    fields = dict.fromkeys(name for key in keys for name in key)
    for name in allow:
        if name not in fields and not name.isupper():
            raise UserError(f"--allow {name}: no such field; {meant(name, fields)}")


def _why_unlike(a: result.Side, b: result.Side, cells_a: _Cells, cells_b: _Cells, allow: Collection[str]) -> str:
    pairs = [unlike(x.key, y.key, allow) for x in cells_a.values() for y in cells_b.values()]
    if not pairs:
        return f"'{a.told if not cells_a else b.told}' has nothing to compare"
    least = min(pairs, key=len)
    fields = "; ".join(f"{each.field}: {each.values}" for each in least)
    what = "they differ" if len(pairs) == 1 else "even the most similar cells differ"
    options = " ".join(f"--allow {shlex.quote(each.field)}" for each in least)
    return f"A and B do not match: {what} in {fields}; to compare anyway, add {options}"


def _may_alarm(figure: MeasuredFigure) -> bool:
    return figure.decides and figure.unit != "bytes"


def _figures(pair: _Pair, threshold: float | None, num_decided: int) -> Iterator[result.ComparedFigure]:
    for first in pair.a.figures:
        of_a, of_b = (cell.samples(first) for _, cell in pair.sides)
        if not of_b:
            continue
        a, b = ([samples for _, samples in side] for side in (of_a, of_b))
        ratio = _ratio(pair, first, of_a, of_b, threshold, num_decided if _may_alarm(first) else 1)
        yield result.ComparedFigure(
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
    pair: _Pair, figure: MeasuredFigure, of_a: _Samples, of_b: _Samples, threshold: float | None, num_decided: int
) -> result.Ratio | None:
    """Ratio of B to A with its uncertainty. Alternating runs are paired by turn; bytes are exact. None for a few single
    times, which have no interval."""
    a, b = ([samples for _, samples in side] for side in (of_a, of_b))
    by_id = dict(of_a + of_b)
    together = [
        ratio_in_turns(*runs, *samples, threshold=threshold, num_decided=num_decided)
        for runs in pair.in_turns
        if _one_per_step(runs, samples := [by_id.get(run.id, ()) for run in runs])
    ]
    if found := [ratio for ratio in together if ratio]:
        return of_starts(found)
    if figure.unit == "bytes":
        before, after = _middle(a, figure), _middle(b, figure)
        return compare_values(before, after, threshold) if before > 0 and after > 0 else None
    count = min(sum(map(len, blocks)) for blocks in (a, b))
    single = max(map(len, (*a, *b))) == 1
    if (single and count < FEWEST) or not all(all(block) for block in (*a, *b)):
        return None
    margin = start_margin([run for _, cell in pair.sides for run in cell.runs])
    return compare_samples(a, b, in_turns=False, threshold=threshold, num_decided=num_decided, margin=margin)


def _one_per_step(runs: Sequence[Run], samples: Sequence[tuple[float, ...]]) -> bool:
    return all(run.turns and len(of) == run.turns.num_steps and all(of) for run, of in zip(runs, samples, strict=True))


def _middle(blocks: Sequence[Sequence[float]], figure: MeasuredFigure) -> float:
    """Median of the samples; for rates, the value at the median step time."""
    samples = [sample for block in blocks for sample in block]
    if figure.group == "speed" and all(samples):
        return 1 / median(1 / sample for sample in samples)
    return median(samples)


def _kernels(pair: _Pair) -> tuple[result.KernelChange, ...]:
    a, b = (cell.newest(lambda run: run.profile) for _, cell in pair.sides)
    return _kernel_changes(a, b, pair.label) if a and b else ()


def _memory(pair: _Pair) -> tuple[result.MemoryChange, ...]:
    a, b = (cell.newest(lambda run: run.memory_profile) for _, cell in pair.sides)
    return _memory_changes(a, b, pair.label) if a and b else ()


def _notes(cells_a: _Cells, cells_b: _Cells, pairs: Sequence[_Pair]) -> Iterator[str]:
    for side, own, other in (("A", cells_a, cells_b), ("B", cells_b, cells_a)):
        if alone := [cell.label for key, cell in own.items() if key not in other]:
            yield f"Only in {side}, not compared: {'; '.join(alone)}."
    for pair in pairs:
        if pair.a.failure:
            both = " So did B." if pair.b.failure else ""
            yield f"{pair.label or 'A'} failed in A: {pair.a.failure}.{both}"
        for side, cell in pair.sides:
            if cell.failures and cell.good:
                label = f"{pair.label}: " if pair.label else ""
                yield (
                    f"{label}{len(cell.failures)} of {counted(len(cell.measured), 'record')} failed in {side}; "
                    f"the others are compared: {cell.failures[-1]}."
                )
