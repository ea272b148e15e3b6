"""A benchmark of attention: its cells, and how each is measured.

The cells come from a grid that steplab brings, from a TOML file, or from lists of values.

A grid in TOML is like a study's: a description and `[[grid]]` tables, each a product of lists. `sequence` sets queries
and keys alike.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from steplab.errors import UserError
from steplab.specs.attention import CELL_FIELDS, PASSES, AttentionPass, AttentionSpec
from steplab.specs.step_fields import Declared
from steplab.specs.study import GRIDS, content_of

Grid = Mapping[str, Sequence[object]]
_PLACE = next(place for place, field in enumerate(CELL_FIELDS) if field.key == "queries")
_SEQUENCE = replace(
    CELL_FIELDS[_PLACE],
    key="sequence",
    attribute="sequence",
    about=Declared(help="Sequence length of both queries and keys"),
)
FIELDS = {field.key: field for field in (*CELL_FIELDS[:_PLACE], _SEQUENCE, *CELL_FIELDS[_PLACE:])}
"""The fields that a grid may set, by their names, in the order of options, of which the first varies slowest;
`sequence` sets those of queries and keys that are not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStudy:
    """The attention cells to measure, and how each is timed and checked."""

    name: str
    """Name of the grid; 'attention' for cells given on the command line."""
    description: str = ""
    """What the grid is for, in one line."""
    cells: tuple[AttentionSpec, ...]
    """The cells without duplicates; cells of one shape are adjacent and are measured together."""
    passes: tuple[AttentionPass, ...] = PASSES
    """The passes that are timed."""
    device: str = "auto"
    """The device: auto, cpu, mps, cuda or cuda:N."""
    warmup_s: float = 0.1
    """Shortest warm-up of each cell and pass, in seconds; each also runs at least three times."""
    measured_s: float = 0.3
    """Time for the repeats of a cell and pass, in seconds; `least_repeats` and `most_repeats` bound their number."""
    least_repeats: int = 10
    """Smallest number of repeats, however long they take."""
    most_repeats: int = 100
    """Largest number of repeats, however short they are."""
    errors: bool = True
    """Whether results are compared with a float64 reference."""
    seed: int = 0
    """Seed of the random inputs."""

    def __post_init__(self) -> None:
        for name in ("warmup_s", "measured_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be a time, not {getattr(self, name)}")
        if not 1 <= self.least_repeats <= self.most_repeats:
            raise UserError("the number of repeats must be at least 1")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed must be of 64 bits, not {self.seed}")

        object.__setattr__(self, "cells", tuple(cell for group in self.groups() for cell in group))

    def groups(self) -> list[tuple[AttentionSpec, ...]]:
        """The cells of each shape, in the order in which shapes first appear."""
        found: dict[AttentionSpec, list[AttentionSpec]] = {}
        for cell in self.cells:
            found.setdefault(cell.shape, []).append(cell)
        return [tuple(cells) for cells in found.values()]


def cells_of_grid(
    source: str, overrides: Grid, defaults: Grid = MappingProxyType({})
) -> tuple[str, str, tuple[AttentionSpec, ...]]:
    """Name, description and cells of a named grid or a TOML file.

    `overrides` replace the grid's own fields; `defaults` apply to fields that neither gives.

    Raises UserError for a grid that does not exist or is not valid.
    """
    content = content_of("grid", source, GRIDS)
    grids = content.get("grid", [])
    unknown = sorted(set(content) - {"description", "grid"})
    if unknown or not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        wrong = f"unknown key '{unknown[0]}'" if unknown else "'grid' must be a list of [[grid]] tables"
        raise UserError(f"grid {source}: {wrong}; a grid has a description and [[grid]] tables")
    cells = cells_of([{**defaults, **_overridden(grid, overrides)} for grid in grids])
    return Path(source).stem, str(content.get("description", "")), cells


def _overridden(grid: Mapping[str, object], overrides: Grid) -> dict[str, Sequence[object]]:
    """The grid with its fields replaced; `sequence` also replaces `queries` and `keys`, and these replace it."""
    lists = {name: list(value) if isinstance(value, list) else [value] for name, value in grid.items()}
    if "sequence" in overrides:
        lists.pop("queries", None)
        lists.pop("keys", None)
    if "queries" in overrides or "keys" in overrides:
        lists.pop("sequence", None)
    return {**lists, **overrides}


def cells_of(grids: Sequence[Grid]) -> tuple[AttentionSpec, ...]:
    """The cells of all products; the first field varies slowest. Raises UserError if there are no cells."""
    cells: dict[AttentionSpec, None] = {}
    for grid in grids:
        for values in itertools.product(*grid.values()):
            cells[resolve_attention(dict(zip(grid, values, strict=True)))] = None
    if not cells:
        raise UserError("no cells to measure; give each field of the grid at least one value")
    return tuple(cells)


def resolve_attention(fields: Mapping[str, object]) -> AttentionSpec:
    """The cell that `fields` describe. Raises UserError that names the field, its value and the valid ones."""
    for name in fields:
        if name not in FIELDS:
            raise UserError(f"unknown field '{name}' of an attention cell; choose one of {', '.join(FIELDS)}")
    found = {name: FIELDS[name].parsed(value) for name, value in fields.items()}
    if "sequence" in found:
        found = dict.fromkeys(("queries", "keys"), found.pop("sequence")) | found
    return AttentionSpec(**found)  # type: ignore[arg-type]
