"""Which runs of a page are the same cell but for one choice, so that their memory can be set side by side."""

from collections.abc import Sequence

from steplab.records.rows import Scalar
from steplab.report.cells import FIELDS, HOW, Cell
from steplab.report.memory_figures import has_owners


def but_for(cell: Cell, *fields: str) -> tuple[Scalar, ...]:
    """What the cell computes, apart from these fields and those that do not change the memory of a step."""
    return tuple(cell.values[field] for field in FIELDS if field not in (*fields, *HOW))


def counterpart(cell: Cell, cells: Sequence[Cell], field: str, value: Scalar) -> Cell | None:
    """The newest watched cell that differs from this one in `field` alone, where it has `value`."""
    wanted = but_for(cell, field)
    found = [
        other
        for other in cells
        if other.run.memory_profile and other.values[field] == value and but_for(other, field) == wanted
    ]
    return max(found, key=lambda other: other.run.created_utc, default=None) if cell.values[field] != value else None


def alike_but_for(cells: Sequence[Cell], field: str) -> list[list[Cell]]:
    """Groups of cells alike in all but `field`, of which they have at least two values; one cell a value.

    Cells with no value there, and snapshots of which nothing is known, belong to no group.
    """
    groups: dict[tuple[Scalar, ...], dict[Scalar, Cell]] = {}
    for cell in cells:
        if cell.values[field] is not None:
            groups.setdefault(but_for(cell, field), {})[cell.values[field]] = cell
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def watched(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with a memory profile."""
    return [cell for cell in cells if cell.run.memory_profile]


def named(cells: Sequence[Cell]) -> list[Cell]:
    """The watched cells whose record says whose memory it was."""
    return [cell for cell in cells if cell.run.memory_profile and has_owners(cell.run.memory_profile)]
