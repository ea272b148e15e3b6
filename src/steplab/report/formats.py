"""Rows of figures as a table, JSON, CSV, Markdown or LaTeX.

One path: rows -> columns -> cells -> syntax. json and csv carry the raw values in base units under the row's
own names, for programs; the others carry what people read.
"""

import csv
import io
import json
from collections.abc import Sequence
from typing import Literal, get_args

from steplab.errors import UserError
from steplab.records.rows import Row
from steplab.report.columns import Column, Sheet, columns_of, make_sheet
from steplab.report.kit.terminal import draw, terminal_width
from steplab.report.kit.text import plain

Format = Literal["table", "json", "csv", "md", "latex"]
FORMATS: tuple[str, ...] = get_args(Format)

_GAP = 2  # blanks between two columns of a terminal table


def render_rows(
    rows: Sequence[Row],
    format: str,
    *,
    columns: Sequence[Column] | None = None,
    empty: str = "no runs",
    width: int | None = None,
    color: bool = False,
) -> str:
    """The rows in one of FORMATS, without a newline at the end; `empty` is what people read where there are none.

    `columns` are those that the formats for people can have; None: those that suit the rows. `width` and `color`
    concern the terminal table alone; width None is the terminal's own.
    Raises UserError for a format that does not exist.
    """
    if format not in FORMATS:
        raise UserError(f"format '{format}' is not known; choose one of {', '.join(FORMATS)}")
    if format == "json":
        return json.dumps(list(rows), indent=2, ensure_ascii=False, allow_nan=False)
    if format == "csv":
        return _csv(rows)
    if not rows:
        return empty
    shown = [{k: plain(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows]
    sheet = make_sheet(shown, columns_of(rows) if columns is None else columns)
    if format == "table":
        return _table(sheet, width or terminal_width(), color)
    return _markdown(sheet) if format == "md" else _latex(sheet)


def _csv(rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    target = io.StringIO()
    writer = csv.DictWriter(target, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)  # None is written as an empty field
    return target.getvalue().removesuffix("\n")


def _markdown(sheet: Sheet) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    lines = [line([escape_markdown(column.header) for column in sheet.columns])]
    lines.append(line(["---:" if column.numeric else "---" for column in sheet.columns]))
    lines += [line([escape_markdown(cell) for cell in cells]) for cells in sheet.cells]
    return "\n".join(lines + (["", escape_markdown(sheet.caption)] if sheet.caption else []))


def escape_markdown(text: str) -> str:
    """Text for a cell of a Markdown table: nothing in it ends the cell, the row, or is taken for HTML."""
    for character in "\\`*_[]|":
        text = text.replace(character, "\\" + character)
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())


def _latex(sheet: Sheet) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(escape_latex(cell) for cell in cells) + r" \\"

    alignment = "".join("r" if column.numeric else "l" for column in sheet.columns)
    lines = [
        "% needs \\usepackage{booktabs}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        line([column.header for column in sheet.columns]),
        r"\midrule",
        *(line(cells) for cells in sheet.cells),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines + ([r"\par\smallskip " + escape_latex(sheet.caption)] if sheet.caption else []))


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
    "…": r"\ldots{}",
    "µ": r"\textmu{}",
    "·": r"\textperiodcentered{}",
} | {character: "\\" + character for character in "&%$#_{}"}


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it stands, character by character, so that no escape is escaped again."""
    return " ".join("".join(_LATEX_ESCAPES.get(character, character) for character in text).split())


def _table(sheet: Sheet, width: int, color: bool) -> str:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown, dropped = _fit(sheet, width)
    if not shown:
        return _stacked(sheet, width, color)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index in shown:
        column = sheet.columns[index]
        table.add_column(
            Text(column.header),
            justify="right" if column.numeric else "left",
            no_wrap=column.wraps_from is None,
            overflow="fold",
        )
    for cells in sheet.cells:
        table.add_row(*(Text(cells[index], style=_style(sheet.columns[index], cells[index])) for index in shown))
    notes = [sheet.caption] if sheet.caption else []
    if dropped:
        names = ", ".join(sheet.columns[index].header for index in dropped)
        notes.append(f"left out at {width} columns: {names}; a wider terminal or --format csv has them")
    return draw(table, *(Text(note, style="dim") for note in notes), width=width, color=color)


def _style(column: Column, text: str) -> str:
    if column.key == "step_time_s":
        return "bold"
    return "red" if column.key == "failure" and text != "ok" else ""


def _fit(sheet: Sheet, width: int) -> tuple[list[int], list[int]]:
    """Indices of the columns that fit, and of those left out, highest rank first; none fit: ([], all)."""
    from rich.cells import cell_len

    def needed(index: int) -> int:
        widest = max(cell_len(cells[index]) for cells in sheet.cells)
        wraps_from = sheet.columns[index].wraps_from
        if wraps_from is not None:
            widest = min(widest, wraps_from)
        return max(widest, cell_len(sheet.columns[index].header)) + _GAP

    needs: dict[int, int] = {index: needed(index) for index in range(len(sheet.columns))}
    shown = list(needs)
    while sum(needs[index] for index in shown) - _GAP > width:
        last = max(shown, key=lambda index: (sheet.columns[index].rank, index))
        if sheet.columns[last].rank == 0:
            return [], list(needs)
        shown.remove(last)
    return shown, [index for index in needs if index not in shown]


def _stacked(sheet: Sheet, width: int, color: bool) -> str:
    """A block a row, a line a field: for a terminal too narrow for even the essential columns."""
    from rich.text import Text

    label = max(len(column.header) for column in sheet.columns)
    parts: list[Text] = []
    for cells in sheet.cells:
        pairs = zip(sheet.columns, cells, strict=True)
        parts += [Text.assemble((f"{c.header:<{label}}  ", "dim"), (cell, _style(c, cell))) for c, cell in pairs]
        parts.append(Text())
    return draw(*parts, Text(sheet.caption, style="dim"), width=width, color=color)
