"""What tells the runs of a page apart, and where each goes in a chart.

A study varies a few fields and holds the rest; a chart needs to know which, without being told. The first
two fields of size that vary become the x axis (model, and context within it), what else varies becomes
colour, and where that would crowd one chart, further fields split it into panels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steplab.records.rows import Scalar
from steplab.records.run import Run
from steplab.report.kit.text import plain
from steplab.specs.checkpointing import CHECKPOINTING
from steplab.specs.model import MODEL_SIZES
from steplab.specs.step import CHOICES, internal_name

FIELDS = (
    "model", "context", "batch", "pass", "precision", "compile", "attention", "checkpointing", "optimizer",
    "layout", "data_parallel", "bucket_size_mb", "warmup", "steps", "seed", "device", "torch", "repeat",
)  # fmt: skip
"""Everything that can tell two runs apart, in the order it is said. `repeat` counts runs otherwise alike."""

_HOW = ("warmup", "steps", "seed", "repeat")
"""Fields about how a step was measured rather than what it computes: said where nothing else tells cells apart."""
_WHAT = tuple(field for field in FIELDS if field not in _HOW)

_SIZES = ("model", "context", "batch")
_PANEL_ORDER = (
    "pass",
    "attention",
    "checkpointing",
    "optimizer",
    "compile",
    "layout",
    "device",
    "torch",
    "warmup",
    "batch",
    "precision",
)
_MOST_SERIES = 6
_MOST_MARKS = 48
_WORDS: dict[tuple[str, Scalar], str] = {
    ("compile", "off"): "eager",
    ("compile", "default"): "compiled",
    ("pass", "forward_backward"): "forward + backward",
    ("checkpointing", "none"): "no checkpointing",
    ("layout", "dp=1"): "one process",
}
_SAID = {
    "context": "context {}",
    "batch": "batch {}",
    "compile": "compiled ({})",
    "warmup": "{} warm-up step{s}",
    "steps": "{} step{s}",
    "seed": "seed {}",
    "attention": "{} attention",
    "checkpointing": "checkpointing {}",
    "bucket_size_mb": "buckets of {:g} MB",
    "torch": "torch {}",
    "repeat": "run {}",
}
_AXIS_NAMES = {"data_parallel": "strategy", "bucket_size_mb": "bucket", "checkpointing": "checkp."}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A run and what tells it apart."""

    run: Run
    """The record."""
    values: dict[str, Scalar]
    """A value for every one of FIELDS; None where the run does not say."""
    unsaid: frozenset[str] = frozenset()
    """Fields that a label leaves out, because others tell this cell from its neighbours."""

    @property
    def id(self) -> str:
        """The run's."""
        return self.run.id


def cells_of(runs: Sequence[Run]) -> list[Cell]:
    """The runs in the order of their fields: sizes ascending, choices as the command line lists them."""
    seen: dict[tuple[Scalar, ...], int] = {}
    cells = []
    for run in sorted(runs, key=lambda run: run.created_utc):
        values = _values(run)
        key = tuple(values.values())
        seen[key] = seen.get(key, 0) + 1
        cells.append(Cell(run=run, values=values | {"repeat": seen[key]}))
    alike: dict[tuple[Scalar, ...], list[Cell]] = {}
    for cell in cells:
        alike.setdefault(_key(cell, _WHAT), []).append(cell)
    cells = [replace(cell, unsaid=_unsaid(cell, alike[_key(cell, _WHAT)])) for cell in cells]
    ranks = {field: _ranks(field, cells) for field in FIELDS}
    return sorted(cells, key=lambda cell: [ranks[field][cell.values[field]] for field in FIELDS])


def _unsaid(cell: Cell, alike: Sequence[Cell]) -> frozenset[str]:
    """The fields of _HOW that do not tell the cell from those `alike` in all the fields said before."""
    unsaid = set()
    for field in _HOW:
        same = [other for other in alike if other.values[field] == cell.values[field]]
        if len(same) == len(alike):
            unsaid.add(field)
        alike = same
    return frozenset(unsaid)


def _values(run: Run) -> dict[str, Scalar]:
    spec, env = run.spec, run.environment
    return {
        "model": plain(spec.model.label if spec else run.name) or "own loop",
        "context": spec.context if spec else None,
        "batch": spec.batch if spec else None,
        "pass": spec.pass_name if spec else None,
        "precision": spec.precision if spec else None,
        "compile": spec.compile if spec else None,
        # A factory's model brings its own attention; the spec's field is not used.
        "attention": spec.attention if spec and spec.model.kind != "factory" else None,
        "checkpointing": spec.checkpointing if spec and spec.checkpoints_apply else None,
        "optimizer": spec.optimizer if spec and spec.pass_name == "train" else None,
        "layout": str(spec.layout) if spec else None,
        "data_parallel": spec.strategy if spec else None,
        "bucket_size_mb": spec.bucket_mb if spec else None,
        "warmup": spec.warmup if spec else None,
        "steps": spec.steps if spec else None,
        "seed": spec.seed if spec else None,
        "device": env.device.name if env else None,
        "torch": env.torch if env else None,
    }


def _ranks(field: str, cells: Sequence[Cell]) -> dict[Scalar, int]:
    """Place of each value of a field; unknown names come after the known ones, as they appeared."""
    appeared = list(dict.fromkeys(cell.values[field] for cell in cells))
    choices = CHOICES | {"model": tuple(MODEL_SIZES), "checkpointing": CHECKPOINTING}
    known = choices.get(internal_name(field), ())

    def place(value: Scalar) -> tuple[int, float]:
        if isinstance(value, (int, float)):
            return (0, value)
        return (0, known.index(value)) if value in known else (1, appeared.index(value))

    return {value: rank for rank, value in enumerate(sorted(appeared, key=place))}


def varying(cells: Sequence[Cell]) -> list[str]:
    """The fields that tell cells apart: those with more than one value, where a label says them at all."""
    differing = [f for f in FIELDS if len({c.values[f] for c in cells} - {None}) > 1]
    return [f for f in differing if not all(f in c.unsaid for c in cells)]


def short(field: str, value: Scalar) -> str:
    """A value where its field is plain from the place it stands in."""
    if value is None:
        return ""
    return _WORDS.get((field, value), str(value))


def said(field: str, value: Scalar) -> str:
    """A value that must explain itself: 'context 1024', 'compiled (default)'."""
    word = _WORDS.get((field, value))
    return _SAID.get(field, "{}").format(value, s="" if value == 1 else "s") if word is None else word


def axis_name(field: str) -> str:
    """What values of a field are called on an axis, where there is little room: as in tables."""
    return _AXIS_NAMES.get(field, field)


def label(cell: Cell, fields: Sequence[str]) -> str:
    """The cell in words, by those of the fields that tell it apart; by its model where none does."""
    telling = [field for field in fields if cell.values[field] is not None and field not in cell.unsaid]
    return " · ".join(said(field, cell.values[field]) for field in telling or ("model",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One set of axes."""

    title: str
    """What its cells share; empty for the only panel."""
    marks: tuple[tuple[int, int, Cell], ...]
    """Position on the x axis, series, cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where every cell goes."""

    outer: str | None
    """Field of the groups along the x axis."""
    inner: str | None
    """Field of the positions within a group."""
    positions: tuple[tuple[str, str], ...]
    """Group and place within it, as they are labelled; the same in all panels."""
    series: tuple[str, ...]
    """Labels of the colours; a single one where colour says nothing."""
    panels: tuple[Panel, ...]
    """At least one."""


def arrange(cells: Sequence[Cell]) -> Layout:
    """Give each varying field its part of the picture."""
    rest = varying(cells)
    axes = [field for field in _SIZES if field in rest][:2] or rest[:1]
    rest = [field for field in rest if field not in axes]
    positions = _distinct(cells, axes)
    panel_fields: list[str] = []
    while len(rest) > 1 and _crowded(len(positions), len(_distinct(cells, rest))):
        moved = next((field for field in _PANEL_ORDER if field in rest), rest[0])
        rest.remove(moved)
        panel_fields.append(moved)
    series = _distinct(cells, rest)
    panels = []
    for values in _distinct(cells, panel_fields):
        inside = [cell for cell in cells if _key(cell, panel_fields) == values]
        panels.append(
            Panel(
                title=_series_label(panel_fields, values) if panel_fields else "",
                marks=tuple((positions.index(_key(c, axes)), series.index(_key(c, rest)), c) for c in inside),
            )
        )
    return Layout(
        outer=axes[0] if axes else None,
        inner=axes[1] if len(axes) > 1 else None,
        positions=tuple(_position_label(cells, axes, position) for position in positions),
        series=tuple(_series_label(rest, key) for key in series),
        panels=tuple(panels),
    )


def _crowded(num_positions: int, num_series: int) -> bool:
    return num_series > _MOST_SERIES or num_positions * num_series > _MOST_MARKS


def _key(cell: Cell, fields: Sequence[str]) -> tuple[Scalar, ...]:
    return tuple(cell.values[field] for field in fields)


def _distinct(cells: Sequence[Cell], fields: Sequence[str]) -> list[tuple[Scalar, ...]]:
    """The combinations that occur, in the order of their own fields (the cells are sorted by others too)."""
    ranks = [_ranks(field, cells) for field in fields]
    keys = dict.fromkeys(_key(cell, fields) for cell in cells)
    return sorted(keys, key=lambda key: [rank[value] for rank, value in zip(ranks, key, strict=True)])


def _series_label(fields: Sequence[str], key: tuple[Scalar, ...]) -> str:
    words = [said(field, value) for field, value in zip(fields, key, strict=True) if value is not None]
    return " · ".join(words) or "other"


def _position_label(cells: Sequence[Cell], axes: Sequence[str], key: tuple[Scalar, ...]) -> tuple[str, str]:
    if not axes:
        return (label(cells[0], ()), "")
    outer = short(axes[0], key[0])
    return (outer, short(axes[1], key[1])) if len(axes) > 1 else (outer, "")
