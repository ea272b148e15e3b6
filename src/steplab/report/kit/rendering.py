"""Writes a document in a given format; here, for programs: its rows with raw values in base units, as JSON or CSV."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence

from steplab.errors import UserError
from steplab.printing import plain
from steplab.report.kit import html, markup, terminal
from steplab.report.kit.document import Document, Row


def to_json(document: Document) -> str:
    """The document's rows; of several tables an object that has the rows of each under its name."""
    return json.dumps(document.data, indent=2, ensure_ascii=False, allow_nan=False)


def to_csv(document: Document) -> str:
    """The document's rows, of several tables those of the first; an absent value is an empty field."""
    found = document.data
    return csv_rows(next(iter(found.values()), ()) if isinstance(found, Mapping) else found)


def csv_rows(rows: Sequence[Row]) -> str:
    """A header and one line per row, without a newline at the end.

    Texts that a spreadsheet would run as formulas, or that begin with an apostrophe, get an apostrophe in front;
    readers restore them by removing one. That holds for names of columns, too, which are another's in a store from
    elsewhere. Numbers stay as they are.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    target = io.StringIO()
    writer = csv.DictWriter(target, keys, lineterminator="\n")
    writer.writerow({key: _inert(key) for key in keys})
    for row in rows:
        writer.writerow({key: _inert(value) if isinstance(value, str) else value for key, value in row.items()})
    return target.getvalue().removesuffix("\n")


def _inert(text: str) -> str:
    """A cell of CSV that spreadsheets show as it is (OWASP, "CSV Injection"); it is looked at as it will leave."""
    text = plain(text)
    return f"'{text}" if text.startswith(_STARTS_A_FORMULA) else text


_STARTS_A_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠", "'")
"""What makes a formula of a cell, the wide forms in spreadsheets for East Asian languages; and the mark itself."""


FORMATS = ("table", "json", "csv", "md", "latex")
"""The formats of text."""
PAGE = "html"
NOTEBOOK = "notebook"
"""A page's content as one element, for a page of another program."""


def render(document: Document, format: str = "table", *, width: int | None = None, color: bool = False) -> str:
    """The document in one of FORMATS, or as PAGE or NOTEBOOK, without a newline at the end.

    `width` and `color` concern the terminal alone; `width` None is the terminal's own. Raises UserError for a format
    that does not exist.
    """
    if format == "table":
        return terminal.render(document, width=width, color=color)
    write = _WRITERS.get(format)
    if write is None:
        raise UserError(f"there is no format '{format}'; choose one of {', '.join((*FORMATS, PAGE))}")
    return write(document)


_WRITERS: dict[str, Callable[[Document], str]] = {
    "json": to_json,
    "csv": to_csv,
    "md": markup.to_markdown,
    "latex": markup.to_latex,
    PAGE: html.to_html,
    NOTEBOOK: html.to_fragment,
}
