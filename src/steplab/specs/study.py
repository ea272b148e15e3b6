"""A study: cells to measure, as the union of cartesian products of field values.

In TOML, each `[[grid]]` is one product; a single value stands for a list of one:

    description = "how far does bf16 carry?"
    [[grid]]
    model = ["small", "medium"]
    context = [128, 256]
    precision = ["fp32", "bf16"]
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from steplab.errors import UserError
from steplab.specs.resolve import resolve_grid
from steplab.specs.step import FIELDS, STEP_FIELDS, StepSpec

Grid = Mapping[str, Sequence[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySpec:
    """A named list of steps to measure, without duplicates, in the order they run."""

    name: str
    """Name of the preset, stem of the file, or 'sweep' for a study from the command line."""
    description: str
    """What the study is for, in one line, for tables and pages."""
    cells: tuple[StepSpec, ...]
    """The steps; at least one."""


def study_from_grids(name: str, description: str, grids: Sequence[Grid]) -> StudySpec:
    """The study of all cells of the grids; the first field varies slowest. Raises UserError for an empty study."""
    cells: list[StepSpec] = []
    for grid in grids:
        for cell in resolve_grid(grid):
            if cell not in cells:
                cells.append(cell)
    if not cells:
        raise UserError(f"study '{name}' has no cells; give at least one [[grid]] with a value for each field")
    return StudySpec(name=name, description=description, cells=tuple(cells))


def labels(cells: Sequence[StepSpec]) -> list[str]:
    """What tells each of several steps from the others, in words; of a single one, its model."""
    fields = [field for field in STEP_FIELDS if len({field.value(cell) for cell in cells}) > 1] or [FIELDS["model"]]
    values = [[(field, field.value(cell)) for field in fields] for cell in cells]
    return [" · ".join(field.say(value) for field, value in of_cell if value is not None) for of_cell in values]


def preset_names() -> tuple[str, ...]:
    """Names of the presets, the studies that come with steplab."""
    folder = files("steplab.specs") / "studies"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_study(source: str, overrides: Grid) -> StudySpec:
    """The study `source` (a preset or a TOML file) with its fields replaced by `overrides`.

    Raises UserError for an unknown preset, an unreadable file, or a file that is not a study.
    """
    if source in preset_names():
        text = (files("steplab.specs") / "studies" / f"{source}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"no study '{source}': choose one of {', '.join(preset_names())}, or give the path of a TOML file"
            ) from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = '; write a dotted field in quotes: "model.num_layers" = [2, 4]' if "model." in text else ""
        raise UserError(f"study {source} is not valid TOML: {error}{hint}") from error
    unknown = set(content) - {"description", "grid"}
    grids = content.get("grid", [])
    if unknown or not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        wrong = f"unknown key '{sorted(unknown)[0]}'" if unknown else "'grid' must be a list of [[grid]] tables"
        raise UserError(f"study {source}: {wrong}; a study has a description and [[grid]] tables")
    return study_from_grids(
        Path(source).stem,
        str(content.get("description", "")),
        [{**{name: _as_list(name, value) for name, value in _flat(grid).items()}, **overrides} for grid in grids],
    )


def _flat(grid: Mapping[str, object]) -> dict[str, object]:
    """The grid with dotted names again, for TOML reads `model.num_layers = 4` as a nested table."""
    flat: dict[str, object] = {}
    for name, value in grid.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": inner_value for inner, inner_value in value.items()}
        else:
            flat[name] = value
    return flat


def _as_list(name: str, value: object) -> list[object]:
    values = list(value) if isinstance(value, list) else [value]
    if not values:
        raise UserError(f"{name} needs at least one value in a study")
    return values
