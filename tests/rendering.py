"""Runs and rows as text, in the formats that commands write."""

from collections.abc import Sequence

from steplab.records.memory_references import MemoryReferences
from steplab.records.rows import Row
from steplab.records.run import Run
from steplab.report.kit.rendering import render
from steplab.report.kit.table import Sheet, sheet
from steplab.report.report import Context
from steplab.report.run.columns import rows_document, rows_table
from steplab.report.runs import REPORT


def rows_text(rows: Sequence[Row], format: str = "table", *, width: int | None = None, color: bool = False) -> str:
    """A table of runs or of studies."""
    return render(rows_document(rows), format, width=width, color=color)


def sheet_of(rows: Sequence[Row]) -> Sheet:
    """What people read of a table of runs or of studies."""
    return sheet(rows_table(rows))


def run_text(
    run: Run,
    format: str = "table",
    *,
    references: MemoryReferences | None = None,
    width: int | None = None,
    color: bool = False,
) -> str:
    """One run in full."""
    (document,) = REPORT.documents([run], Context(references=references))
    return render(document, format, width=width, color=color)
