"""Writes a document in a given format; JSON and CSV hold its rows with raw values in base units."""

import json
from collections.abc import Callable, Mapping

from steplab.errors import UserError
from steplab.report.kit import html, markup, terminal
from steplab.report.kit.document import Document, Section
from steplab.report.kit.pictures import Beside
from steplab.report.kit.table import csv_rows


def to_json(document: Document) -> str:
    """JSON list of rows; for several tables, an object with their rows by name."""
    return json.dumps(document.data, indent=2, ensure_ascii=False, allow_nan=False)


def to_csv(document: Document) -> str:
    found = document.data
    return csv_rows(next(iter(found.values()), ()) if isinstance(found, Mapping) else found)


FORMATS = ("table", "json", "csv", "md", "latex")
PAGE = "html"
PICTURE = "svg"
NOTEBOOK = "notebook"
"""HTML element instead of a whole page."""


def to_svg(document: Document) -> str:
    beside = Beside("")
    markup.to_markdown(document, beside)
    for path, content in beside.files.items():
        if path.endswith(".svg"):
            return content.decode()
    raise UserError("there is no picture of these records here")


def chapter_of(document: Document, title: str) -> Document:
    found = list(document.sections)
    for section in found:  # which grows by inner sections
        if title and section.title.lower().startswith(title.lower()):
            return Document(title=document.title, subtitle=document.subtitle, sections=(section,))
        found += [block for block in section.blocks if isinstance(block, Section)]
    known = ", ".join(section.title for section in document.sections if section.title)
    raise UserError(f"no chapter or section begins with '{title}'; choose one of {known}")


def render(
    document: Document,
    format: str = "table",
    *,
    width: int | None = None,
    color: bool = False,
    beside: Beside | None = None,
) -> str:
    """Write the document in one of FORMATS, or as PAGE, NOTEBOOK or PICTURE, without a final newline.

    `width` and `color` concern the terminal; `width` None is the terminal's own. `beside` collects pictures and long
    tables of Markdown and LaTeX. Raises UserError for an unknown format.
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
"""Formats whose pictures are separate files."""
_WRITERS: dict[str, Callable[[Document], str]] = {
    "json": to_json,
    "csv": to_csv,
    PAGE: html.to_html,
    PICTURE: to_svg,
    NOTEBOOK: html.to_fragment,
}
