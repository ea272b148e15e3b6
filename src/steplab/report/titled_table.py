"""Tables of a study with a title and a caption: in a text, on a terminal, on the page."""

from collections.abc import Sequence
from dataclasses import dataclass

from steplab.records.rows import Row
from steplab.report.columns import Column, make_sheet
from steplab.report.formats import escape_markdown, render_rows
from steplab.report.grid import Grid
from steplab.report.kit.terminal import draw


@dataclass(frozen=True, kw_only=True, slots=True)
class TitledTable:
    """Rows of one kind."""

    title: str
    """Heading."""
    columns: tuple[Column, ...]
    """What people are shown of them."""
    rows: list[Row]
    """In base units; with a status, each."""
    caption: str
    """How to read it."""


_NO_ROWS = "nothing was measured"


def headed(title: str, text: str, format: str) -> str:
    """A text of md, latex or another such format under its heading."""
    return {"md": "## {}\n\n", "latex": "% {}\n"}.get(format, "{}\n").format(title) + text


def write_table(table: TitledTable, format: str) -> str:
    """A table in md or latex."""
    text = render_rows(table.rows, format, columns=table.columns, empty=_NO_ROWS)
    remark = f"\n\n{escape_markdown(table.caption)}" if format == "md" else f"\n% {table.caption}"
    return headed(table.title, text + remark, format)


def write_notes(notes: Sequence[str], format: str) -> list[str]:
    """What is to be said beside the tables, as one text in md or latex; none without notes."""
    if not notes:
        return []
    if format == "latex":
        return ["\n".join(f"% {' '.join(line.split())}" for line in ("Notes", *notes))]
    return [headed("Notes", "\n".join(f"- {escape_markdown(note)}" for note in notes), format)]


def draw_table(table: TitledTable, width: int, color: bool) -> str:
    """A table for a terminal."""
    from rich.text import Text

    drawn = render_rows(table.rows, "table", columns=table.columns, empty=_NO_ROWS, width=width, color=color)
    head, foot = Text(table.title, style="bold"), Text(table.caption, style="dim")
    return f"{draw(head, width=width, color=color)}\n{drawn}\n{draw(foot, width=width, color=color)}"


def grid_of(table: TitledTable) -> Grid:
    """A table for the page; rows that are not ok stand out."""
    sheet = make_sheet(table.rows, table.columns)
    return Grid(
        headers=tuple(column.header for column in sheet.columns),
        rows=sheet.cells,
        numeric=tuple(column.numeric for column in sheet.columns),
        caption=" · ".join(part for part in (sheet.caption, table.caption) if part),
        bad_rows=frozenset(index for index, row in enumerate(table.rows) if row.get("status", "ok") != "ok"),
    )
