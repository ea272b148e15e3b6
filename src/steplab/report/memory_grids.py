"""Tables of a memory profile, as texts, for the terminal and for the page."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from steplab import units
from steplab.records.memory_profile import Allocation, LeftOut, MemoryProfile, SavedTensors
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report.columns import ABSENT
from steplab.report.grid import Grid
from steplab.report.memory_figures import Part, allocated_bytes, error_text, parts, saved_bytes, whole
from steplab.report.memory_tensors import node_name, what_it_is
from steplab.report.memory_words import category_word
from steplab.report.shares import format_share

_Item = TypeVar("_Item")
_ALLOCATION_HEADERS = (
    "size",
    "count",
    "together",
    "at peak",
    "category",
    "what it is",
    "module",
    "line",
    "phase",
    "op",
    "shape",
    "dtype",
)
_SAVED_HEADERS = ("module", "saved by", "shape", "dtype", "count", "memory", "share", "category")
_SUMS = ("count", "together", "memory", "share")
"""What rows that look alike add up in."""
_WHOLE = frozenset({"category", "phase", "line", "module", "op", "saved by", "shape", "dtype"})


def category_grid(profile: MemoryProfile, prediction: MemoryPrediction | None = None) -> Grid:
    """The peak by category, last the peak; with a prediction its bytes and its error beside them."""
    rows = [_part_row(part, predicted=prediction is not None) for part in parts(profile, prediction)]
    rows.append(_part_row(whole(profile, prediction), predicted=prediction is not None))
    more = ("predicted", "predicted bytes", "error") if prediction else ()
    return Grid(
        headers=("category", "size", "bytes", "share", *more),
        rows=tuple(rows),
        numeric=(False, True, True, True, *(True for _ in more)),
        caption="error: of the predicted bytes against the measured ones" if prediction else "",
    )


def _part_row(part: Part, *, predicted: bool) -> tuple[str, ...]:
    sizes = (units.format_bytes(part.num_bytes), f"{part.num_bytes:,}")
    row = (category_word(part.category), *sizes, format_share(part.share))
    if not predicted:
        return row
    if not part.predicted_bytes:
        return (*row, ABSENT, ABSENT, ABSENT)
    error = ABSENT if part.error is None else error_text(part.error)
    return (*row, units.format_bytes(part.predicted_bytes), f"{part.predicted_bytes:,}", error)


def phase_grid(run: Run, profile: MemoryProfile) -> Grid | None:
    """Each phase's peak in the watched step, and in the timed steps that nobody watched; None without phases."""
    if not profile.phases:
        return None
    counted = {peak.phase: peak.peak_allocated_bytes for peak in run.memory.peaks} if run.memory else {}
    rows = []
    for phase, peak_bytes in profile.phase_peaks.items():
        timed = counted.get(phase)
        sizes = (units.format_bytes(peak_bytes), f"{peak_bytes:,}")
        rows.append((phase, *sizes, ABSENT if timed is None else f"{timed:,}"))
    grid = Grid(
        headers=("phase", "peak", "bytes", "unwatched, bytes"), rows=tuple(rows), numeric=(False, True, True, True)
    )
    return grid if any(phase in counted for phase in profile.phase_peaks) else grid.without("unwatched, bytes")


def largest_grid(
    run: Run,
    allocations: Sequence[Allocation],
    *,
    hidden: Sequence[str] = (),
    line: Callable[[str], str] = str,
    most: int | None = None,
) -> Grid:
    """Allocations without the hidden columns, those together that look alike in the others: first what was alive at the
    peak, most bytes first, and of that only so many rows as `most` says.

    `line` shortens source lines. Columns nobody has anything for are left out, those not shown are told in the caption.
    """
    looks = [_allocation_look(made, run, line) for made in allocations]
    empty = [name for name in _ALLOCATION_HEADERS if looks and all(look.get(name) == ABSENT for look in looks)]
    shown = [name for name in _ALLOCATION_HEADERS if name not in (*hidden, *empty)]
    groups = _alike(allocations, looks, [name for name in ("at peak", *shown) if name not in _SUMS])
    ordered = sorted(groups, key=lambda group: (not group[1][0].at_peak, -allocated_bytes(group[1])))
    rows = []
    for look, made in ordered[:most]:
        sums = {"count": f"{sum(one.count for one in made):,}", "together": units.format_bytes(allocated_bytes(made))}
        rows.append(tuple((look | sums)[name] for name in shown))
    left = [one for _, made in ordered[most:] for one in made] if most is not None else []
    more = f"And {units.counted(len(ordered) - len(rows), 'kind')} more, {units.format_bytes(allocated_bytes(left))}."
    return Grid(
        headers=tuple(shown),
        rows=tuple(rows),
        numeric=tuple(name in ("size", "count", "together") for name in shown),
        whole=_WHOLE,
        caption=more if left else "",
    )


def _allocation_look(made: Allocation, run: Run, line: Callable[[str], str]) -> dict[str, str]:
    return {
        "size": units.format_bytes(made.requested_bytes),
        "at peak": "yes" if made.at_peak else "no",
        "category": category_word(made.category),
        "phase": made.phase or ABSENT,
        "line": line(made.source) if made.source else ABSENT,
        "what it is": (what_it_is(made, run.spec) or ABSENT).removeprefix("a tensor of the "),
        "module": made.module or ABSENT,
        "op": made.op or ABSENT,
        "shape": shape_text(made.shape) if made.shape is not None else ABSENT,
        "dtype": made.dtype or ABSENT,
    }


def _alike(
    items: Iterable[_Item], looks: Sequence[dict[str, str]], columns: Sequence[str]
) -> list[tuple[dict[str, str], list[_Item]]]:
    """The items that look alike in these columns, together, with their look."""
    found = defaultdict[tuple[str, ...], tuple[dict[str, str], list[_Item]]](lambda: ({}, []))
    for item, look in zip(items, looks, strict=True):
        first, group = found[tuple(look[name] for name in columns)]
        first |= {} if first else look
        group.append(item)
    return list(found.values())


def shape_text(shape: Sequence[int]) -> str:
    """4 × 12 × 512 × 512; scalar for no dimensions."""
    return " × ".join(str(n) for n in shape) or "scalar"


def saved_grid(
    saved: Sequence[SavedTensors],
    most: int,
    *,
    left_out: LeftOut | None = None,
    hidden: Sequence[str] = (),
    module: Callable[[str], str] = str,
) -> Grid:
    """Saved tensors without the hidden columns, those together that look alike in the others; most bytes first, and how
    many kinds more there are, of which `left_out` are not in the record. `module` shortens modules' names."""
    looks = [_saved_look(tensors, module) for tensors in saved]
    empty = [name for name in ("module", "saved by") if all(look[name] == ABSENT for look in looks)]
    shown = [name for name in _SAVED_HEADERS if name not in (*hidden, *empty)]
    groups = _alike(saved, looks, [name for name in shown if name not in _SUMS])
    ordered = sorted(groups, key=lambda group: -saved_bytes(group[1]))
    beyond = left_out.num_bytes if left_out else 0
    total = saved_bytes(saved) + beyond
    rows = []
    for look, tensors in ordered[:most]:
        size = saved_bytes(tensors)
        sums = {"count": f"{sum(one.count for one in tensors):,}", "memory": units.format_bytes(size)}
        sums["share"] = format_share(size / total) if total else ABSENT
        rows.append(tuple((look | sums)[name] for name in shown))
    left = len(ordered) - len(rows) + (left_out.count if left_out else 0)
    left_bytes = saved_bytes(one for _, tensors in ordered[most:] for one in tensors) + beyond
    holding = units.format_bytes(left_bytes) if left_bytes else "which hold no memory of their own"
    return Grid(
        headers=tuple(shown),
        rows=tuple(rows),
        numeric=tuple(name in _SUMS for name in shown),
        whole=_WHOLE,
        caption=f"And {units.counted(left, 'kind')} more, {holding}." if left else "",
    )


def _saved_look(tensors: SavedTensors, module: Callable[[str], str]) -> dict[str, str]:
    return {
        "module": module(tensors.module) if tensors.module else ABSENT,
        "saved by": node_name(tensors.op) or ABSENT,
        "shape": shape_text(tensors.shape),
        "dtype": tensors.dtype,
        "category": category_word(tensors.category),
    }
