"""Finds the fields that distinguish the runs of a page, and places each run in a chart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from steplab.printing import plain
from steplab.records.rows import Scalar
from steplab.records.run import Run
from steplab.report.kit.grouping import grouped
from steplab.report.kit.labels import short_name
from steplab.specs.step import STEP_FIELDS

_STEP = {field.column: field for field in STEP_FIELDS}
_AROUND = {"device": "{}", "torch": "torch {}", "repeat": "run {}"}
AXES = tuple(sorted((f for f in _STEP if _STEP[f].about.role == "size"), key=lambda f: _STEP[f].about.axis))
_QUANTITIES = tuple(field for field in AXES if _STEP[field].type is int)
_ROLES = {name: field.about.role for name, field in _STEP.items()}

FIELDS = (
    *AXES,
    *(name for name, role in _ROLES.items() if role == "what"),
    *(name for name, role in _ROLES.items() if role in ("how", "device")),
    *_AROUND,
)
"""Fields that can distinguish two runs, in label order; `repeat` numbers otherwise equal runs."""

HOW = (*(name for name, role in _ROLES.items() if role in ("how", "device")), "repeat")
"""Fields about how a run was measured; labels use them only if no other field differs."""
_WHAT = tuple(field for field in FIELDS if field not in HOW)
COMPARED = tuple(field for field in FIELDS if _ROLES.get(field) != "device")
"""Fields that must agree when another field is compared."""
_PANEL_ORDER = {name: field.about.panel for name, field in _STEP.items()} | {"device": 7, "torch": 8}
_MAIN = (*AXES, "pass", "precision", "compile", "attention")
_USUAL = {name: str(field.default) for name, field in _STEP.items() if name not in _MAIN}
_MOST_SAID = 4
_MOST_SERIES = 6
_MOST_NAMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCell:
    run: Run
    values: dict[str, Scalar]
    """One value per field of FIELDS; None if unknown."""
    unsaid: frozenset[str] = frozenset()
    """Fields omitted from the label, because others distinguish the run."""
    called: str = ""
    """Label text in place of the number (`repeat`) that would distinguish equal runs."""

    @property
    def id(self) -> str:
        return self.run.id


def cells_of(runs: Sequence[Run]) -> list[RunCell]:
    seen: dict[tuple[Scalar, ...], int] = {}
    cells = []
    for run in sorted(runs, key=lambda run: run.created_utc):
        values = _values(run)
        key = tuple(values.values())
        seen[key] = seen.get(key, 0) + 1
        cells.append(RunCell(run=run, values=values | {"repeat": seen[key]}))
    equal = grouped(cells, lambda cell: tuple(cell.values[field] for field in FIELDS if field != "repeat"))
    cells = [cell for group in equal.values() for cell in _called(group)]
    alike = grouped(cells, lambda cell: _key(cell, _WHAT))
    cells = [replace(cell, unsaid=_unsaid(cell, alike[_key(cell, _WHAT)])) for cell in cells]
    ranks = {field: _ranks(field, cells) for field in FIELDS}
    return sorted(cells, key=lambda cell: [ranks[field][cell.values[field]] for field in FIELDS])


def _called(equal: Sequence[RunCell]) -> list[RunCell]:
    """Labels equal cells by run name, with the id if names repeat; unnamed cells by their number.

    A run without a spec, such as a recorded loop, has its name in place of the model; its label is the id.
    """
    names = [short_name(cell.run.name) for cell in equal]
    called = []
    for cell, name in zip(equal, names, strict=True):
        if not name:
            called.append(replace(cell, called=said("repeat", cell.values["repeat"])))
        elif cell.run.spec is None:
            called.append(replace(cell, called=f"run {cell.id}"))
        else:
            called.append(replace(cell, called=f"'{name}'" + f" ({cell.id})" * (names.count(name) > 1)))
    return called


def _unsaid(cell: RunCell, alike: Sequence[RunCell]) -> frozenset[str]:
    """Fields of HOW that the label of `cell` omits: those with one value among cells that share all earlier ones."""
    unsaid = set()
    for field in HOW:
        same = [other for other in alike if other.values[field] == cell.values[field]]
        if len(same) == len(alike):
            unsaid.add(field)
        alike = same
    return frozenset(unsaid)


def _values(run: Run) -> dict[str, Scalar]:
    spec, env = run.spec, run.environment
    step = {name: field.value(spec) if spec else None for name, field in _STEP.items()}
    return step | {
        "model": plain(str(step["model"] or run.name)) or "own loop",
        "device": env.device.name if env else None,
        "torch": env.torch if env else None,
    }


def _ranks(field: str, cells: Sequence[RunCell]) -> dict[Scalar, int]:
    appeared = list(dict.fromkeys(cell.values[field] for cell in cells))
    step = _STEP.get(field)
    known = (step.choices or step.about.order) if step else ()

    def place(value: Scalar) -> tuple[int, float]:
        if isinstance(value, (int, float)):
            return (0, value)
        return (0, known.index(value)) if value in known else (1, appeared.index(value))

    return {value: rank for rank, value in enumerate(sorted(appeared, key=place))}


def varying(cells: Sequence[RunCell]) -> list[str]:
    differing = [f for f in FIELDS if len({c.values[f] for c in cells} - {None}) > 1]
    return [f for f in differing if not all(f in c.unsaid for c in cells)]


def said(field: str, value: Scalar) -> str:
    """A field's value in words, such as 'context 1024' or 'compiled (max-autotune)'."""
    return _STEP[field].say(value) if field in _STEP else _AROUND[field].format(value)


def is_usual(field: str, value: Scalar) -> bool:
    """True if the field is no size and has its default value."""
    return field in _STEP and field not in AXES and str(value) == str(_STEP[field].default)


def label(cell: RunCell, fields: Sequence[str]) -> str:
    telling = _telling([field for field in fields if field not in cell.unsaid], cell.values)
    return " · ".join(_said_of((cell,), field, cell.values[field]) for field in telling or ("model",))


def _said_of(cells: Sequence[RunCell], field: str, value: Scalar) -> str:
    if field != "repeat":
        return said(field, value)
    if len(called := {cell.called for cell in cells}) == 1:
        return called.pop()
    names = sorted({f"'{short_name(cell.run.name)}'" for cell in cells if cell.run.name})
    of = f"({', '.join(names)})" if len(names) <= _MOST_NAMES else "of each step"
    return f"{said(field, value)} {of}" if names else said(field, value)


def _telling(fields: Sequence[str], values: Mapping[str, Scalar]) -> list[str]:
    known = [field for field in fields if values[field] is not None]
    if len(known) <= _MOST_SAID:
        return known
    return [field for field in known if field not in _USUAL or str(values[field]) != _USUAL[field]]


def over_size(cells: Sequence[RunCell]) -> tuple[str, dict[str, dict[str, list[RunCell]]]] | None:
    """Field of the size that varies, and the cells by panel and series; None if no series has two sizes.

    A second size, such as the model's, distinguishes the series. Repeated measurements share a series, unless nothing
    else distinguishes the cells.
    """
    rest = varying(cells)
    axis = next((field for field in _QUANTITIES if field in rest), None)
    if axis is None or any(not cell.values[axis] for cell in cells):
        return None
    rest.remove(axis)
    rest = [field for field in rest if field not in HOW] or rest
    other = next((f for f in AXES if f in rest and len(_distinct(cells, [f])) <= _MOST_SERIES), None)
    panel_fields: list[str] = []
    while len(rest) > 1 and len(_distinct(cells, rest)) > _MOST_SERIES:
        movable = (field for field in rest if field != other)
        panel_fields.append(min(movable, key=lambda field: _PANEL_ORDER.get(field, 99)))
        rest.remove(panel_fields[-1])
    titles, names = _labels(cells, panel_fields), _labels(cells, rest)
    panels: dict[str, dict[str, list[RunCell]]] = {title: {} for title in titles.values()}
    for key, name in names.items():
        for cell in cells:
            if _key(cell, rest) == key:
                panels[titles[_key(cell, panel_fields)]].setdefault(name, []).append(cell)
    sizes = ({cell.values[axis] for cell in some} for lines in panels.values() for some in lines.values())
    return (axis, panels) if max(map(len, sizes)) > 1 else None


def _labels(cells: Sequence[RunCell], fields: Sequence[str]) -> dict[tuple[Scalar, ...], str]:
    if not fields:
        return {(): ""}
    keys = _distinct(cells, fields)
    return {key: _series_label([c for c in cells if _key(c, fields) == key], fields, key) for key in keys}


def _key(cell: RunCell, fields: Sequence[str]) -> tuple[Scalar, ...]:
    return tuple(cell.values[field] for field in fields)


def _distinct(cells: Sequence[RunCell], fields: Sequence[str]) -> list[tuple[Scalar, ...]]:
    ranks = [_ranks(field, cells) for field in fields]
    keys = dict.fromkeys(_key(cell, fields) for cell in cells)
    return sorted(keys, key=lambda key: [rank[value] for rank, value in zip(ranks, key, strict=True)])


def _series_label(cells: Sequence[RunCell], fields: Sequence[str], key: tuple[Scalar, ...]) -> str:
    values = dict(zip(fields, key, strict=True))
    return " · ".join(_said_of(cells, field, values[field]) for field in _telling(fields, values)) or "other"
