"""Finds runs whose cells differ in one choice only, so that their memory can be compared."""

from collections.abc import Iterable, Sequence

from steplab.records.memory_profile import MemoryProfile
from steplab.records.rows import Scalar
from steplab.records.run import Run
from steplab.report.memory.figures import has_owners
from steplab.report.run.cells import FIELDS, HOW, RunCell, cells_of

BASELINES = (("precision", "fp32"), ("checkpointing", "none"))
"""The choices whose effect on memory is told, each with the value that it is compared with."""


def watched(cells: Sequence[RunCell]) -> list[RunCell]:
    """The cells with a memory profile."""
    return [cell for cell in cells if cell.run.memory_profile]


def with_owners(cells: Sequence[RunCell]) -> list[RunCell]:
    """The watched cells whose record has categories by owner."""
    return [cell for cell in watched(cells) if has_owners(profile_of(cell))]


def profile_of(cell: RunCell) -> MemoryProfile:
    """The memory profile of a watched cell."""
    assert cell.run.memory_profile is not None
    return cell.run.memory_profile


def among(run: Run, others: Iterable[Run]) -> tuple[RunCell, list[RunCell]]:
    """The cell of a run among those of others, and the cells of all."""
    every = cells_of(list({other.id: other for other in (*others, run)}.values()))
    return next(cell for cell in every if cell.id == run.id), every


def counterpart(cell: RunCell, cells: Sequence[RunCell], field: str, value: Scalar) -> RunCell | None:
    """The newest watched cell that differs from this one in `field` alone, where it has `value`."""
    wanted = _but_for(cell, field)
    found = [other for other in watched(cells) if other.values[field] == value and _but_for(other, field) == wanted]
    return max(found, key=lambda other: other.run.created_utc, default=None) if cell.values[field] != value else None


def alike_but_for(cells: Sequence[RunCell], field: str) -> list[list[RunCell]]:
    """Groups of cells that differ only in `field` and have at least two values of it; one cell per value.

    Cells without a value of the field, such as imported snapshots, belong to no group.
    """
    groups: dict[tuple[Scalar, ...], dict[Scalar, RunCell]] = {}
    for cell in cells:
        if cell.values[field] is not None:
            groups.setdefault(_but_for(cell, field), {})[cell.values[field]] = cell
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def _but_for(cell: RunCell, field: str) -> tuple[Scalar, ...]:
    """What the cell computes, apart from one field and those that do not change the memory of a step."""
    return tuple(cell.values[name] for name in FIELDS if name not in (field, *HOW))
