"""Compare two sides' records, and equal runs commit by commit."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from steplab.comparison.changes import change_points
from steplab.comparison.comparing import compare as compare_records
from steplab.comparison.samples import IN_TURNS
from steplab.errors import UserError
from steplab.lab.choosing import find_records
from steplab.lab.keeping import open_store
from steplab.records.comparison import Comparison, Point, Series
from steplab.records.record import Record
from steplab.records.rows import Row
from steplab.records.run_figures import RUN_FIGURES
from steplab.specs.step import FIELDS, STEP_FIELDS
from steplab.specs.step_fields import StepField

METRICS = tuple(figure.key for figure in RUN_FIGURES if not figure.is_words)
_ALIKE = (*(field.column for field in FIELDS.values() if field.about.role not in ("how", "device")), "device")
"""Columns in which all runs of a series agree."""


def compare(
    a: Record | Sequence[Record] | str,
    b: Record | Sequence[Record] | str = "last",
    *,
    threshold: float | None = None,
    allow: Collection[str] = (),
    store: Path | str | None = None,
) -> Comparison:
    """Compare records B with records A, as `steplab compare` does.

        found = steplab.compare(before, after, allow=["torch"])
        found.outcome  # fine, undecided or regression
        steplab.show(found)

    A and B are records, or a text as in `find_records`. `threshold` is the smallest difference that matters, as a
    share; `allow` names fields that may differ.

    Raises UserError if a text names no record, and errors.Inconclusive if records differ in a field outside `allow`.
    """
    before, after = (find_records(each, store=store) for each in (a, b))
    return compare_records(
        before.side, after.side, before.records, after.records, threshold=threshold, allow=frozenset(allow)
    )


def history(
    metric: str = "step_time_s",
    *,
    fields: Mapping[str, Sequence[object]] | None = None,
    name: str | None = None,
    threshold: float | None = None,
    store: Path | str | None = None,
) -> tuple[Series, ...]:
    """A metric's values over time for each step and device, the longest series first.

    `fields` maps step fields to accepted values; `name`: the runs'. `metric`: a column of `steplab list`, with or
    without unit: step_time or step_time_s. `threshold`: smallest change reported, as a share; None: 1 %.

    Raises UserError for an unknown metric, and if no run matches.
    """
    key = _metric(metric)
    with open_store(store, write=False) as opened:
        rows = [row for row in opened.rows(name=name) if _matches(row, fields or {})]
    rows = [row for row in reversed(rows) if row.get(key)]
    if not rows:
        raise UserError(f"no run in {opened.path} matches and has {key}; `steplab list` shows the runs")
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault(tuple(map(row.get, _ALIKE)), []).append(row)
    found = [_series(key, some, threshold if threshold is not None else IN_TURNS) for some in alike.values()]
    return tuple(sorted(found, key=lambda series: -len(series.points)))


def _metric(given: str) -> str:
    name = given.replace("-", "_")
    for key in METRICS:
        if name == key or key.removeprefix(name) in ("_s", "_bytes", "_per_s"):
            return key
    raise UserError(f"no figure '{given}'; choose one of {', '.join(METRICS)}")


def _matches(row: Row, fields: Mapping[str, Sequence[object]]) -> bool:
    return all(str(row.get(FIELDS[key].column)) in map(str, values) for key, values in fields.items())


def _series(key: str, rows: Sequence[Row], threshold: float) -> Series:
    points = tuple(_points(key, rows))
    first = rows[0]
    said = (field.say(first[field.column]) for field in STEP_FIELDS if _is_said(field, first))
    label = " · ".join([*said, str(first.get("device") or "device not known")])
    changes = change_points([point.value for point in points], threshold=threshold)
    return Series(label=label, metric=key, points=points, changes=changes)


def _is_said(field: StepField, row: Row) -> bool:
    value = row.get(field.column)
    quiet = field.about.quiet and str(value) == str(field.default)
    return field.about.role in ("size", "what") and value is not None and not quiet


def _points(key: str, rows: Sequence[Row]) -> Iterator[Point]:
    groups = itertools.groupby(rows, key=lambda row: row.get("git_commit") or row["id"])
    for _, group in groups:
        some = list(group)
        yield Point(
            created_utc=str(some[-1]["created_utc"]),
            commit=str(some[0]["git_commit"]) if some[0].get("git_commit") else None,
            ids=tuple(str(row["id"]) for row in some),
            value=median(float(row[key] or 0) for row in some),
        )
