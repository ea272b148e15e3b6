"""Tables of a memory profile, as texts, for the terminal and for the page."""

from collections.abc import Sequence

from steplab import units
from steplab.records.memory_profile import Allocation, MemoryProfile, SavedTensors
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report.columns import ABSENT
from steplab.report.grid import Grid
from steplab.report.memory_figures import Part, parts, saved_bytes, whole
from steplab.report.memory_tensors import what_it_is
from steplab.report.memory_words import category_word
from steplab.report.shares import format_share


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
    if not predicted or part.predicted_bytes is None:
        return row
    error = ABSENT if part.error is None else f"{100 * part.error:+.2f} %"
    return (*row, units.format_bytes(part.predicted_bytes), f"{part.predicted_bytes:,}", error)


def phase_grid(run: Run, profile: MemoryProfile) -> Grid | None:
    """Each phase's peak in the watched step, and in the timed steps that nobody watched; None without phases."""
    if not profile.phases:
        return None
    counted = {peak.phase: peak.peak_allocated_bytes for peak in run.memory.peaks} if run.memory else {}
    rows = []
    for phase in profile.phases:
        timed = counted.get(phase.name)
        sizes = (units.format_bytes(phase.peak_bytes), f"{phase.peak_bytes:,}")
        rows.append((phase.name, *sizes, ABSENT if timed is None else f"{timed:,}"))
    grid = Grid(
        headers=("phase", "peak", "bytes", "unwatched, bytes"), rows=tuple(rows), numeric=(False, True, True, True)
    )
    return grid if any(phase.name in counted for phase in profile.phases) else grid.without("unwatched, bytes")


def largest_grid(run: Run, allocations: Sequence[Allocation]) -> Grid:
    """Allocations, each with all that is known of it; columns nobody has anything for are left out."""
    rows = tuple(
        (
            units.format_bytes(made.requested_bytes),
            str(made.count),
            units.format_bytes(made.requested_bytes * made.count),
            "yes" if made.at_peak else "no",
            category_word(made.category),
            made.phase or ABSENT,
            made.source or ABSENT,
            what_it_is(made, run.spec) or ABSENT,
            made.module or ABSENT,
            made.op or ABSENT,
            shape_text(made.shape) if made.shape is not None else ABSENT,
            made.dtype or ABSENT,
        )
        for made in allocations
    )
    headers = (
        "size",
        "count",
        "together",
        "at peak",
        "category",
        "phase",
        "line",
        "what it is",
        "module",
        "op",
        "shape",
        "dtype",
    )
    grid = Grid(headers=headers, rows=rows, numeric=(True, True, True, *(False for _ in headers[3:])))
    empty = [name for i, name in enumerate(headers) if all(row[i] == ABSENT for row in rows)]
    return grid.without(*empty) if rows else grid


def shape_text(shape: Sequence[int]) -> str:
    """4 × 12 × 512 × 512; scalar for no dimensions."""
    return " × ".join(str(n) for n in shape) or "scalar"


def saved_grid(saved: Sequence[SavedTensors], most: int) -> Grid:
    """Saved tensors, most bytes first, and how many kinds more there are."""
    total = saved_bytes(saved)
    ordered = sorted(saved, key=lambda tensors: -tensors.stored_bytes)
    rows = tuple(
        (
            tensors.module or ABSENT,
            tensors.op or ABSENT,
            shape_text(tensors.shape),
            tensors.dtype,
            str(tensors.count),
            units.format_bytes(tensors.stored_bytes),
            format_share(tensors.stored_bytes / total) if total else ABSENT,
            category_word(tensors.category),
        )
        for tensors in ordered[:most]
    )
    left = len(saved) - len(rows)
    left_bytes = units.format_bytes(saved_bytes(ordered[most:]))
    return Grid(
        headers=("module", "saved by", "shape", "dtype", "count", "memory", "share", "category"),
        rows=rows,
        numeric=(False, False, False, False, True, True, True, False),
        caption=f"and {units.counted(left, 'kind')} more, {left_bytes}" if left else "",
    )
