"""Defines the columns of tables of runs and studies, and the table of `steplab list`.

Rows (`records.rows.run_row`) hold base units, as do JSON and CSV. Printed tables move values common to all rows into
the caption.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from steplab.records.disturbances import MEANINGS
from steplab.records.registry import KINDS
from steplab.records.rows import Row, Scalar
from steplab.records.run_figures import RUN_FIGURES
from steplab.report.kit.document import RESULT, Column, Document, Section, Table
from steplab.report.kit.quantities import LABEL, Quantity
from steplab.specs.step import STEP_FIELDS
from steplab.specs.step_fields import StepField

_DAY = Quantity(lambda value: str(value)[:10], numeric=False)


def _field_column(field: StepField) -> Column:
    return Column(
        key=field.column,
        header=field.header,
        quantity=Quantity(field.text, numeric=field.type in (int, float)),
        shared=(lambda value: "") if field.about.role == "device" else field.say,  # the environment names the device
        quiet=str(field.default) if field.about.quiet else None,
        rank=field.about.rank,
        folds=True,
    )


COLUMNS: tuple[Column, ...] = (
    Column(key="id"),
    Column(key="name", shared="named '{}'", rank=1, folds=True),
    *{column.key: column for kind in KINDS.values() for column in Column.of(kind.listed)}.values(),
    Column(key="num_cells", header="cells", quantity=LABEL, shared="{} cell{s}", folds=True),
    Column(key="num_ok", header="ok", quantity=LABEL, shared="{} ok", folds=True),
    Column(key="num_failed", header="failed", quantity=LABEL, shared="{} failed", quiet="0", folds=True),
    Column(key="created_utc", header="measured", quantity=_DAY, shared="measured {}", rank=9),
    # The way of measuring follows the computation.
    *map(_field_column, sorted(STEP_FIELDS, key=lambda field: field.about.role in ("how", "device"))),
    Column(key="device", shared="{}", rank=6, folds=True),
    *Column.of(RUN_FIGURES),
    Column(key="torch", shared="torch {}", rank=7, folds=True),
    Column(key="git_commit", header="commit", shared="commit {}", rank=7, folds=True),
    replace(RESULT, wraps_from=30),
)
"""Columns in order; `failure` also shows `status`."""


_MEMORY_RANKS = {
    "peak_allocated_bytes": 0,
    **dict.fromkeys(("batch", "pass", "compile", "checkpointing", "peak_reserved_bytes"), 1),
    **dict.fromkeys(("name", "attention"), 2),
    "mfu": 3,
}


def rows_document(rows: Sequence[Row], *, empty: str = "no runs") -> Document:
    table = rows_table(rows, empty=empty)
    return Document(title="", sections=(Section.of("", table),), data=table.rows)


def rows_table(rows: Sequence[Row], columns: Sequence[Column] | None = None, *, empty: str = "") -> Table:
    sentences = ["Times are medians."] if any(row.get("step_time_s") is not None for row in rows) else []
    if any(row.get("processes") not in (None, 1) for row in rows):
        sentences.append("Batch, times and memory are of rank 0.")
    if any(isinstance(share := row.get(key), float) and share > 1 for row in rows for key in ("mfu", "hfu")):
        sentences.append("A share above 100 % means that the peak or the FLOP count is wrong; see `steplab show ID`.")
    return Table(
        name="runs",
        columns=tuple(_explained(_columns_of(rows) if columns is None else columns, rows)),
        rows=tuple(rows),
        caption=" ".join(sentences),
        empty=empty,
    )


def _columns_of(rows: Sequence[Row]) -> tuple[Column, ...]:
    watched = sum(row.get("memory_source") is not None for row in rows)
    if 2 * watched <= len(rows):
        return COLUMNS
    return tuple(replace(column, rank=_MEMORY_RANKS.get(column.key, column.rank)) for column in COLUMNS)


CONVENTIONS = {
    "causal": "without masked scores",
    "full": "with masked scores",
    "params": "by parameters × tokens",
    "counted": "as torch counts operators",
    "given": "as stated by you",
    "as_executed": "with recomputation, and masked scores unless kernels skip them",
}
"""By FLOP convention of MFU and HFU, the FLOPs that it counts."""


def _warning(words: Scalar) -> str:
    told = (f"{word} ({MEANINGS[word]})" if word in MEANINGS else word for word in str(words).split(", "))
    return f"every row's warning: {', '.join(told)}"


def _explained(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Add the rows' FLOP convention to the MFU heading, and the meanings of their warnings to the notes."""
    warned = " ".join(str(row.get("warnings") or "") for row in rows)
    meanings = [f"{word.capitalize()}: {meaning}." for word, meaning in MEANINGS.items() if word in warned]
    conventions = {str(row["mfu_convention"]) for row in rows if row.get("mfu_convention") is not None}
    added: dict[str, dict[str, Any]] = {
        "hfu": {"header": "HFU (as executed)", "note": f"As executed: FLOPs {CONVENTIONS['as_executed']}."},
        "warnings": {"note": " ".join(meanings), "shared": _warning},
    }
    if len(conventions) == 1:
        (convention,) = conventions
        note = f"{convention.capitalize()}: FLOPs {CONVENTIONS[convention]}." if convention in CONVENTIONS else ""
        added["mfu"] = {"header": f"MFU ({convention})", "note": note}
    return [
        replace(column, **{"header": column.heading} | added.get(column.key, {}))
        for column in columns
        if not (column.key == "mfu_convention" and "mfu" in added)
    ]


_FIGURES = ("step_time_s", "warnings", "peak_allocated_bytes", "mfu")
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
    """Tabulate records of any kinds with the fields `keys`, or else those that differ.

    The caption has common values. JSON and CSV have all fields, or `keys`.
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
    if key == "created_utc":
        one_year = len({str(row.get(key))[:4] for row in rows}) == 1
        shown = slice(5, 16) if one_year else slice(0, 10)
        quantity = Quantity(lambda value: str(value)[shown].replace("T", " "), numeric=False)
        return Column(key=key, header="UTC" if one_year else "measured", quantity=quantity)
    return _KNOWN.get(key) or Column(key=key, header=key.replace("_", " "))


def _differs(key: str, rows: Sequence[Row]) -> bool:
    """True if values differ, or if many records lack one."""
    values = {row.get(key) for row in rows} - _NONE
    if len(values) != 1:
        return len(values) > 1
    having = [row.get("kind") for row in rows if row.get(key) not in _NONE]
    lacking = [row.get("kind") for row in rows if row.get(key) in _NONE and row.get("status", "ok") == "ok"]
    return 2 * len(having) <= len(rows) or not set(having).isdisjoint(lacking)


def _said(column: Column, rows: Sequence[Row]) -> str:
    value = next((row[column.key] for row in rows if row.get(column.key) not in _NONE), None)
    return "" if value is None or column.quantity.show(value) == column.quiet else column.said(value)
