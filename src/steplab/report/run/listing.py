"""The list of stored records: what each is, when and where it was made, and then the fields in which they differ."""

from collections.abc import Sequence
from dataclasses import replace

from steplab.records.rows import Row
from steplab.report.kit.document import RESULT, Column, Document, Section
from steplab.report.kit.quantities import Quantity
from steplab.report.run.columns import COLUMNS, rows_table

_FIGURES = ("step_time_s", "warnings", "peak_allocated_bytes", "mfu")
"""The figures that a list has; others are columns where they are asked for."""
_OWN = (
    Column(key="kind"),
    Column(key="status"),
    Column(key="tags", shared="tags {}", rank=1, folds=True),
    Column(key="comment", wraps_from=16, rank=1),
)
_NONE = {None, ""}
_FIRST = ("id", "created_utc", "kind", "name", "tags", "device")
_KNOWN = {column.key: column for column in (*COLUMNS, *_OWN)}


def list_document(rows: Sequence[Row], keys: Sequence[str] = ()) -> Document:
    """A table of records of any kinds with these fields, in this order; without any, with those that tell them apart.

    A value that all records share is in the caption. JSON and CSV have all fields, or those that were asked for.
    """
    if keys:
        chosen = [replace(_column(key, rows), shared="", quiet=None, rank=0, folds=False) for key in keys]
        table = rows_table([{key: row.get(key) for key in keys} for row in rows], chosen, empty="no records")
    else:
        choices = [column for column in _KNOWN.values() if column.folds and column.key not in _FIRST]
        first = [_column(key, rows) for key in _FIRST]
        differing = [c for c in (*first, *choices) if not c.folds or _differs(c.key, rows)]
        last = [_KNOWN[key] for key in (*_FIGURES, "comment")]
        table = rows_table(rows, [*differing, *last, replace(RESULT, wraps_from=12)], empty="no records")
        shared = [_said(column, rows) for column in (*first, *choices) if column not in differing]
        table = replace(table, caption=". ".join(filter(None, (" · ".join(filter(None, shared)), table.caption))))
    return Document(title="", sections=(Section.of("", table),), data=table.rows)


def _column(key: str, rows: Sequence[Row]) -> Column:
    """The column of a field; one that no table has otherwise has the field's name as its heading."""
    if key == "created_utc":
        one_year = len({str(row.get(key))[:4] for row in rows}) == 1
        shown = slice(5, 16) if one_year else slice(0, 10)
        quantity = Quantity(lambda value: str(value)[shown].replace("T", " "), numeric=False)
        return Column(key=key, header="UTC" if one_year else "measured", quantity=quantity)
    return _KNOWN.get(key) or Column(key=key, header=key.replace("_", " "))


def _differs(key: str, rows: Sequence[Row]) -> bool:
    """Whether a field tells records apart: by its value, or because most have none, or some of one kind."""
    values = {row.get(key) for row in rows} - _NONE
    if len(values) != 1:
        return len(values) > 1
    having = [row.get("kind") for row in rows if row.get(key) not in _NONE]
    lacking = [row.get("kind") for row in rows if row.get(key) in _NONE and row.get("status", "ok") == "ok"]
    return 2 * len(having) <= len(rows) or not set(having).isdisjoint(lacking)


def _said(column: Column, rows: Sequence[Row]) -> str:
    """The value that all records with the field share, in words; empty if there is none, or it is not worth saying."""
    value = next((row[column.key] for row in rows if row.get(column.key) not in _NONE), None)
    return "" if value is None or column.quantity.show(value) == column.quiet else column.said(value)
