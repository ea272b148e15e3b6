"""A study: steps to time, in products of field values, and further measurements.

In TOML, each `[[grid]]` is a product of timed steps; a single value is a list of one. `[[profile]]`, `[[memory]]` and
`[[precision]]` are grids of steps that are also profiled, watched or audited. `[[attention]]`, `[[comm]]`, `[[ddp]]`
and `[[doctor]]` are one benchmark each, with its command's options. docs/studies.md has an example.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from steplab.errors import UserError
from steplab.specs.resolve import Grid, as_grid, cells_of_grids, resolve_grid
from steplab.specs.step import FIELDS, STEP_FIELDS, StepSpec, describe
from steplab.units import counted
from steplab.unpacking import small_file

GRIDS, STUDIES = "attention_grids", "studies"
"""Folders of preset TOML files in steplab.specs."""
STEP_PARTS = ("profile", "memory", "precision")
"""Commands that examine one step; a study's tables of them are grids of steps."""
BENCHMARKS = ("doctor", "attention", "comm", "ddp")
"""Commands that measure the machine or many cells; a study's tables of them hold options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A measurement of a study beyond the timing of a step."""

    kind: str
    """The command that measures it: one of STEP_PARTS or BENCHMARKS."""
    step: StepSpec | None = None
    """Step to profile, watch or audit; None for a benchmark."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of a benchmark as given; model sizes have dotted names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySpec:
    """Distinct steps to time, in order, and further measurements."""

    name: str
    """Name of the preset, stem of the file, or 'sweep' for a study from the command line."""
    description: str
    """Purpose of the study, in one line, for tables and pages."""
    cells: tuple[StepSpec, ...]
    """The steps that are only timed; at least one, unless there are parts."""
    parts: tuple[Part, ...] = ()
    """Measurements beyond the timing of steps."""
    gpus: int = 0
    """GPUs that the measurements need."""
    questions: str = ""
    """Preset or file of questions that the report answers; empty: a report without questions."""
    includes: tuple["StudySpec", ...] = ()
    """Studies to include; those that need more GPUs than there are get skipped."""

    def __len__(self) -> int:
        return len(self.cells) + len(self.parts)


def study_from_grids(name: str, description: str, grids: Sequence[Grid]) -> StudySpec:
    """Study of all steps in these grids; the first field varies slowest. Raises UserError for an empty study."""
    cells = cells_of_grids(grids, resolve_grid)
    if not cells:
        raise UserError(f"study '{name}' has no cells; give at least one [[grid]] with a value for each field")
    return StudySpec(name=name, description=description, cells=cells)


def fitted(study: StudySpec, num_gpus: int) -> StudySpec:
    """Study merged with its included ones, without those that need more than `num_gpus`, which the description lists.
    Raises UserError if none is left."""
    kept, missing = list[StudySpec](), list[StudySpec]()

    def choose(one: StudySpec) -> None:
        if one.gpus > num_gpus:
            missing.append(one)
            return
        for included in one.includes:
            choose(included)
        if len(one):
            kept.append(one)

    choose(study)
    if not kept:
        raise UserError(
            f"study '{study.name}' needs {counted(min(one.gpus for one in missing), 'GPU')}, and this machine has "
            f"{num_gpus or 'none'}; `steplab study quick` measures any machine"
        )
    left_out = [f"not measured: {one.name}, which needs {counted(one.gpus, 'GPU')}" for one in missing]
    parts = tuple(part for one in kept for part in one.parts)
    watched = [part.step for part in parts if part.kind in ("profile", "memory")]
    cells = list[StepSpec]()
    for one in kept:  # a watched step is timed as well
        cells += [cell for cell in one.cells if cell not in cells and cell not in watched]
    description = "; ".join(filter(None, (study.description, *left_out)))
    return StudySpec(
        name=study.name, description=description, cells=tuple(cells), parts=_distinct(parts), questions=study.questions
    )


def _distinct(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts without duplicates; `doctor` first, because the others use its results."""
    found = [part for number, part in enumerate(parts) if part not in parts[:number]]
    return tuple(sorted(found, key=lambda part: (*BENCHMARKS[:1], *STEP_PARTS, *BENCHMARKS[1:]).index(part.kind)))


def labels(cells: Sequence[StepSpec]) -> list[str]:
    """Label of each step, from the fields that differ; a single step's label is its model."""
    values = {field: [field.value(cell) for cell in cells] for field in STEP_FIELDS}
    # A field that affects only some steps, with one value, is left out: the field that decides this is in the label.
    telling = [field for field, found in values.items() if len(set(found) - {None}) > 1] or [FIELDS["model"]]
    return [
        " · ".join(field.say(value) for field in telling if (value := values[field][index]) is not None)
        for index in range(len(cells))
    ]


def in_common(cells: Sequence[StepSpec]) -> list[str]:
    words = [describe(cell).split(" · ") for cell in cells]
    return [word for word in words[0] if all(word in others for others in words)]


def load_study(source: str, overrides: Grid) -> StudySpec:
    """Read a preset or a TOML file; `overrides` replace fields of its steps. Raises UserError for an unknown preset and
    an unreadable or invalid file."""
    content = content_of("study", source, STUDIES, _File)
    try:
        return _study(Path(source).stem, content, overrides)
    except UserError as error:
        raise UserError(f"study {source}: {error}") from error


Tables = list[dict[str, Any]]


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    description: str = ""
    gpus: Annotated[int, msgspec.Meta(ge=0)] = 0
    include: list[str] = []
    questions: str = ""
    grid: Tables = []
    profile: Tables = []
    memory: Tables = []
    precision: Tables = []
    doctor: Tables = []
    attention: Tables = []
    comm: Tables = []
    ddp: Tables = []


def _study(name: str, content: _File, overrides: Grid) -> StudySpec:
    if not set(content.include) <= set(preset_names(STUDIES)):
        raise UserError(f"'include' must be a list of presets: {', '.join(preset_names(STUDIES))}")

    def grids(kind: str) -> list[Grid]:
        flat = [as_grid(_flat(grid)) for grid in getattr(content, kind)]
        for empty in (name for grid in flat for name, values in grid.items() if not values):
            raise UserError(f"{empty} needs at least one value in a study")
        return [{**grid, **overrides} for grid in flat]

    parts = [
        *(Part(kind=kind, step=cell) for kind in STEP_PARTS for grid in grids(kind) for cell in resolve_grid(grid)),
        *(Part(kind=kind, options=_flat(options)) for kind in BENCHMARKS for options in getattr(content, kind)),
    ]
    includes = tuple(load_study(preset, overrides) for preset in content.include)
    must_time = content.grid or not (parts or includes)
    return StudySpec(
        name=name,
        description=content.description,
        cells=study_from_grids(name, content.description, grids("grid")).cells if must_time else (),
        parts=_distinct(parts),
        gpus=content.gpus,
        questions=content.questions,
        includes=includes,
    )


def _flat(grid: Mapping[str, object]) -> dict[str, object]:
    """Fields with dotted names: TOML reads `model.num_layers = 4` as a nested table."""
    flat: dict[str, object] = {}
    for name, value in grid.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": inner_value for inner, inner_value in value.items()}
        else:
            flat[name] = value
    return flat


def preset_names(folder: str) -> tuple[str, ...]:
    found = (files("steplab.specs") / folder).iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml")))


Content = TypeVar("Content", bound=msgspec.Struct)


def content_of(what: str, source: str, folder: str, content: type[Content]) -> Content:
    """Content of a preset in `folder`, or of a TOML file. `what` names its kind in errors, such as study. Raises
    UserError for an unknown preset, and an unreadable or invalid file.
    """
    names = preset_names(folder)
    if source in names:
        text = (files("steplab.specs") / folder / f"{source}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = small_file(Path(source)).decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{what} {source} is not valid TOML: it is not text in UTF-8") from error
        except OSError as error:
            choice = f"choose one of {', '.join(names)}, or give the path of a TOML file"
            found = f"{source} cannot be read ({error.strerror})" if Path(source).exists() else f"no {what} '{source}'"
            raise UserError(f"{found}: {choice}") from error
    try:
        return msgspec.toml.decode(text, type=content)
    except msgspec.ValidationError as error:
        keys = ", ".join(content.__struct_fields__)
        raise UserError(f"{what} {source}: {error}; a {what} has the keys {keys}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        hint = '; write a dotted field in quotes: "model.num_layers" = [2, 4]' if "model." in text else ""
        raise UserError(f"{what} {source} is not valid TOML: {error}{hint}") from error
