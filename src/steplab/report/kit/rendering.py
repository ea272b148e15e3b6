"""Writes a document in a given format; here, for programs: its rows with raw values in base units, as JSON or CSV."""

import json
from collections.abc import Callable, Mapping

from steplab.errors import UserError
from steplab.report.kit import html, markup, terminal
from steplab.report.kit.document import Document
from steplab.report.kit.pictures import Beside
from steplab.report.kit.table import csv_rows


def to_json(document: Document) -> str:
    """The document's rows; of several tables an object that has the rows of each under its name."""
    return json.dumps(document.data, indent=2, ensure_ascii=False, allow_nan=False)


def to_csv(document: Document) -> str:
    """The document's rows, of several tables those of the first; an absent value is an empty field."""
    found = document.data
    return csv_rows(next(iter(found.values()), ()) if isinstance(found, Mapping) else found)


FORMATS = ("table", "json", "csv", "md", "latex")
"""The formats of text."""
PAGE = "html"
NOTEBOOK = "notebook"
"""A page's content as one element, for a page of another program."""


def render(
    document: Document,
    format: str = "table",
    *,
    width: int | None = None,
    color: bool = False,
    beside: Beside | None = None,
) -> str:
    """The document in one of FORMATS, or as PAGE or NOTEBOOK, without a newline at the end.

    `width` and `color` concern the terminal alone; `width` None is the terminal's own. `beside` takes the pictures and
    long tables of Markdown and LaTeX; None: there are none. Raises UserError for a format that does not exist.
    """
    if format == "table":
        return terminal.render(document, width=width, color=color)
    if format in PICTURED:
        return PICTURED[format](document, beside)
    write = _WRITERS.get(format)
    if write is None:
        raise UserError(f"there is no format '{format}'; choose one of {', '.join((*FORMATS, PAGE))}")
    return write(document)


PICTURED: dict[str, Callable[[Document, Beside | None], str]] = {"md": markup.to_markdown, "latex": markup.to_latex}
"""Formats that may refer to files beside them."""
_WRITERS: dict[str, Callable[[Document], str]] = {
    "json": to_json,
    "csv": to_csv,
    PAGE: html.to_html,
    NOTEBOOK: html.to_fragment,
}
