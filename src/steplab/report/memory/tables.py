"""Tables of a memory profile: the peak by category, the phases, the largest allocations, what autograd saved."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from steplab import units
from steplab.records.memory_profile import Allocation, LeftOut, MemoryProfile, SavedTensors
from steplab.records.prediction import MemoryPrediction
from steplab.records.rows import Row, Scalar
from steplab.records.run import Run
from steplab.report.kit.document import Column, Table
from steplab.report.kit.quantities import BYTES, NUMBER, SHARE, Quantity
from steplab.report.memory.categories import category_word
from steplab.report.memory.figures import Part, allocated_bytes, error_text, parts, saved_bytes, whole
from steplab.report.memory.tensors import node_name, what_it_is

_Item = TypeVar("_Item")
_MOST_ROWS = 40
_FIRST_ALLOCATIONS, _FIRST_SAVED = 10, 8


def category_rows(profile: MemoryProfile, prediction: MemoryPrediction | None = None) -> tuple[Row, ...]:
    """One row per category with anything at the peak, measured or predicted; `bytes` sum to `peak_bytes`.

    With a prediction also predicted_bytes, which sum to predicted_peak_bytes, and error, of the predicted against
    the measured; both are None for what the prediction does not cover.
    """
    predicted = prediction is not None
    covered = {"predicted_peak_bytes": whole(profile, prediction).predicted_bytes} if predicted else {}
    peak: Row = {"peak_bytes": profile.peak_bytes, **covered, "peak_phase": profile.peak_phase}
    return tuple({**_part_row(part, predicted=predicted), **peak} for part in parts(profile, prediction))


def _part_row(part: Part, *, predicted: bool) -> Row:
    row: Row = {"category": part.category, "bytes": part.num_bytes, "share": part.share}
    return {**row, "predicted_bytes": part.predicted_bytes, "error": part.error} if predicted else row


def category_table(profile: MemoryProfile, prediction: MemoryPrediction | None = None) -> Table:
    """The peak by category and, last, the peak; with a prediction its bytes and its error beside them."""
    every = [*parts(profile, prediction), whole(profile, prediction)]
    return Table(
        name="peak_by_category",
        columns=(
            Column(key="name", header="category"),
            Column(key="bytes", header="size", quantity=BYTES),
            Column(key="bytes", quantity=NUMBER, rank=1),
            Column(key="share", quantity=SHARE, rank=2),
            Column(key="predicted_bytes", header="predicted"),
            Column(key="predicted_bytes", quantity=NUMBER, rank=3),
            Column(key="error", quantity=Quantity(error_text)),
        ),
        rows=tuple(
            {"name": category_word(part.category), **_part_row(part, predicted=prediction is not None)}
            for part in every
        ),
        caption="The error is that of the predicted bytes, relative to the measured ones." if prediction else "",
    )


def phase_table(run: Run, profile: MemoryProfile) -> Table:
    """Each phase's peak in the watched step, and in the timed steps that nobody watched."""
    counted = {peak.phase: peak.peak_allocated_bytes for peak in run.memory.peaks} if run.memory else {}
    rows = tuple(
        {"phase": phase, "peak_bytes": peak_bytes, "unwatched_bytes": counted.get(phase)}
        for phase, peak_bytes in profile.phase_peaks.items()
    )
    unwatched = "Unwatched is the peak that the allocator counted over the timed steps, without recording."
    return Table(
        name="phases",
        columns=(
            Column(key="phase"),
            Column(key="peak_bytes", header="peak"),
            Column(key="peak_bytes", header="bytes", quantity=NUMBER, rank=2),
            Column(key="unwatched_bytes", quantity=NUMBER, rank=1),
        ),
        rows=rows,
        caption=unwatched if any(row["unwatched_bytes"] is not None for row in rows) else "",
    )


def allocation_table(
    run: Run, allocations: Sequence[Allocation], *, remark: str | None = None, folded: bool = False
) -> Table:
    """Allocations, those together that look alike, most bytes first; `remark` ends the caption."""
    groups = _alike(allocations, lambda made: _allocation_look(made, run), allocated_bytes)
    rest = [made for _, group in groups[_MOST_ROWS:] for made in group]
    left_out = _left_out(len(groups) - _MOST_ROWS, allocated_bytes(rest))
    return Table(
        name="allocations",
        columns=(
            Column(key="requested_bytes", header="size"),
            Column(key="count", quantity=NUMBER, rank=1),
            Column(key="together_bytes", header="total"),
            Column(key="category"),
            Column(key="what", header="tensor", rank=2, wraps_from=20),
            Column(key="module", rank=3),
            Column(key="line", rank=1),
            Column(key="function", rank=5),
            Column(key="phase", rank=4),
            Column(key="shape", rank=6),
            Column(key="dtype", rank=7),
            Column(key="op", header="operator", rank=8),
            Column(key="folder", rank=9, wraps_from=24),
        ),
        rows=tuple(
            {**look, "count": sum(made.count for made in group), "together_bytes": allocated_bytes(group)}
            for look, group in groups[:_MOST_ROWS]
        ),
        caption=" ".join(filter(None, (left_out, remark))),
        first=_FIRST_ALLOCATIONS,
        folded=folded,
    )


def _allocation_look(made: Allocation, run: Run) -> Row:
    """What is shown of one; the line, its function and its folder each for itself: 'a/model.py:81 in forward'."""
    place, _, function = (made.source or "").partition(" in ")
    folder, _, line = place.rpartition("/")
    return {
        "requested_bytes": made.requested_bytes,
        "category": category_word(made.category),
        "what": (what_it_is(made, run.spec) or "").removeprefix("a tensor of the "),
        "line": line,
        "function": function,
        "phase": made.phase,
        "module": made.module,
        "shape": None if made.shape is None else shape_text(made.shape),
        "dtype": made.dtype,
        "op": made.op,
        "folder": folder,
    }


def saved_table(saved: Sequence[SavedTensors], left_out: LeftOut | None = None) -> Table:
    """Saved tensors, those together that look alike, most bytes first; `left_out` are kinds that the record had no room
    for, which count in the total."""
    groups = _alike(saved, _saved_look, saved_bytes)
    rest = [tensors for _, group in groups[_MOST_ROWS:] for tensors in group]
    beyond = left_out or LeftOut(count=0, num_bytes=0)
    total = saved_bytes(saved) + beyond.num_bytes
    num_left = max(len(groups) - _MOST_ROWS, 0) + beyond.count
    return Table(
        name="saved",
        columns=(
            Column(key="module", rank=1),
            Column(key="saved_by"),
            Column(key="shape"),
            Column(key="dtype", rank=4),
            Column(key="count", quantity=NUMBER, rank=3),
            Column(key="stored_bytes", header="memory"),
            Column(key="share", quantity=SHARE, rank=2),
            Column(key="category", rank=5),
        ),
        rows=tuple(
            {
                **look,
                "count": sum(tensors.count for tensors in group),
                "stored_bytes": saved_bytes(group),
                "share": saved_bytes(group) / total if total else None,
            }
            for look, group in groups[:_MOST_ROWS]
        ),
        caption=_left_out(num_left, saved_bytes(rest) + beyond.num_bytes),
        first=_FIRST_SAVED,
    )


def _saved_look(tensors: SavedTensors) -> Row:
    return {
        "module": tensors.module,
        "saved_by": node_name(tensors.op),
        "shape": shape_text(tensors.shape),
        "dtype": tensors.dtype,
        "category": category_word(tensors.category),
    }


def _alike(
    items: Iterable[_Item], look: Callable[[_Item], Row], size: Callable[[list[_Item]], int]
) -> list[tuple[Row, list[_Item]]]:
    """The items that look alike together, with their look, most bytes first."""
    found: dict[tuple[Scalar, ...], tuple[Row, list[_Item]]] = {}
    for item in items:
        seen = look(item)
        found.setdefault(tuple(seen.values()), (seen, []))[1].append(item)
    return sorted(found.values(), key=lambda group: -size(group[1]))


def _left_out(count: int, num_bytes: int) -> str:
    if count <= 0:
        return ""
    held = f"{units.format_bytes(num_bytes)} together" if num_bytes else "without memory of their own"
    return f"The table leaves out {units.counted(count, 'smaller kind')}, {held}."


def shape_text(shape: Sequence[int]) -> str:
    """4 × 12 × 512 × 512; scalar for no dimensions."""
    return " × ".join(map(str, shape)) or "scalar"
