"""The columns of tables of runs and of studies, each defined once.

A row (`records.rows.run_row`) holds figures in base units. JSON and CSV have the figures unchanged; tables for people
show the columns that differ, and what all rows share once, in the caption.
"""

from collections.abc import Sequence
from dataclasses import replace

from steplab.records.rows import Row
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
    Column(key="name", shared="{}", rank=1, folds=True),
    Column(key="description", shared="{}", rank=3, folds=True),
    Column(key="num_ranks", header="ranks", quantity=LABEL, shared="{} rank{s}", folds=True),
    Column(key="backend", shared="{}", rank=1, folds=True),
    Column(key="collectives", shared="collectives: {}", rank=1, wraps_from=16, folds=True),
    Column(key="contenders", header="variants", shared="variants: {}", rank=1, wraps_from=20, folds=True),
    Column(key="num_cells", header="cells", quantity=LABEL, shared="{} cell{s}", folds=True),
    Column(key="num_ok", header="ok", quantity=LABEL, shared="{} ok", folds=True),
    Column(key="num_failed", header="failed", quantity=LABEL, shared="{} failed", quiet="0", folds=True),
    Column(key="created_utc", header="measured", quantity=_DAY, shared="measured {}", rank=9),
    # How a step was measured stands behind what it computes.
    *map(_field_column, sorted(STEP_FIELDS, key=lambda field: field.about.role in ("how", "device"))),
    Column(key="device", shared="{}", rank=6, folds=True),
    *Column.of(RUN_FIGURES),
    Column(key="torch", shared="torch {}", rank=7, folds=True),
    Column(key="git_commit", header="commit", shared="commit {}", rank=7, folds=True),
    replace(RESULT, wraps_from=30),
)
"""Every column that a table for people can have, of runs and of studies, in order. `failure` also shows `status`."""


_MEMORY_RANKS = {
    "peak_allocated_bytes": 0,
    **dict.fromkeys(("batch", "pass", "compile", "checkpointing", "peak_reserved_bytes"), 1),
    **dict.fromkeys(("name", "attention"), 2),
    "mfu": 3,
}
"""Columns that a narrow table of memory keeps longest: the peak, and the choices that change it."""


def rows_document(rows: Sequence[Row], *, empty: str = "no runs") -> Document:
    """A table of records or of studies by itself."""
    table = rows_table(rows, empty=empty)
    return Document(title="", sections=(Section.of("", table),), data=table.rows)


def rows_table(rows: Sequence[Row], columns: Sequence[Column] | None = None, *, empty: str = "") -> Table:
    """One row per run or study; `columns` None: those that suit the rows."""
    sentences = ["Times are medians."] if any(row.get("step_time_s") is not None for row in rows) else []
    if any(isinstance(share := row.get(key), float) and share > 1 for row in rows for key in ("mfu", "hfu")):
        sentences.append("A share above 100 % means that the peak or the FLOP count is wrong; see `steplab show ID`.")
    return Table(
        name="runs",
        columns=tuple(_with_conventions(_columns_of(rows) if columns is None else columns, rows)),
        rows=tuple(rows),
        caption=" ".join(sentences),
        empty=empty,
    )


def _columns_of(rows: Sequence[Row]) -> tuple[Column, ...]:
    """COLUMNS, ranked for memory where most of the runs have a memory profile."""
    watched = sum(row.get("memory_source") is not None for row in rows)
    if 2 * watched <= len(rows):
        return COLUMNS
    return tuple(replace(column, rank=_MEMORY_RANKS.get(column.key, column.rank)) for column in COLUMNS)


def _with_conventions(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Name the FLOP convention of MFU and HFU, in the heading where all rows share it."""
    conventions = {row["mfu_convention"] for row in rows if row.get("mfu_convention") is not None}
    headings = {"hfu": "HFU (as executed)"}
    if len(conventions) == 1:
        headings["mfu"] = f"MFU ({conventions.pop()})"
    return [
        replace(column, header=headings.get(column.key, column.heading))
        for column in columns
        if not (column.key == "mfu_convention" and "mfu" in headings)
    ]
