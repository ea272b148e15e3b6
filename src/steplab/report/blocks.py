"""Parts a page of text on a terminal is made of: titled sections, pairs, tables of figures."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from steplab.report.fitting import broken, widths
from steplab.report.grid import Grid
from steplab.report.kit.text import plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


INDENT = 2
"""Columns by which what stands under a section's title is moved to the right."""


def section(title: str, *parts: "RenderableType") -> "Iterator[RenderableType]":
    """An empty line, the title, and the parts under it, indented."""
    from rich.padding import Padding
    from rich.text import Text

    yield Text()
    yield Text(title, style="bold")
    for part in parts:
        yield Padding(part, (0, 0, 0, INDENT))


def pairs_table() -> "Table":
    """A borderless table of names and what they are."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def figure_table(*headers: str, numeric: Sequence[bool] = ()) -> "Table":
    """A table whose columns are figures, or text where `numeric` says so; the default: the first alone is text."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    figures = numeric or (False, *(True for _ in headers[1:]))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for header, is_figure in zip(headers, figures, strict=True):
        table.add_column(Text(header), justify="right" if is_figure else "left", overflow="fold")
    return table


def grid_table(grid: Grid, width: int) -> "Table":
    """A Grid as a table of at most this width, which breaks between words and figures.

    Whatever its texts hold, they do not steer the terminal.
    """
    from rich.text import Text

    table = figure_table(*grid.headers, numeric=grid.numeric)
    # Set here, for rich takes from the widest first, whatever its least width, and then crops at the right.
    sizes = widths(grid, width)
    for column, size in zip(table.columns, sizes, strict=True):
        column.width = size
    for row in grid.rows:
        texts = zip(map(plain, row), grid.numeric, sizes, strict=True)
        table.add_row(*(Text(broken(text, size) if is_figure else text) for text, is_figure, size in texts))
    return table
