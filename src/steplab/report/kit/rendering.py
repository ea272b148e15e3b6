"""Writes a document in a given format."""

from collections.abc import Callable

from steplab.errors import UserError
from steplab.report.kit import data, html, markup, terminal
from steplab.report.kit.document import Document

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
    "json": data.to_json,
    "csv": data.to_csv,
    "md": markup.to_markdown,
    "latex": markup.to_latex,
    PAGE: html.to_html,
    NOTEBOOK: html.to_fragment,
}
