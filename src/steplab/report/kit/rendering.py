"""Writes a document in a given format."""

from steplab.errors import UserError
from steplab.report.kit import data, markup, terminal
from steplab.report.kit.document import Document

FORMATS = ("table", "json", "csv", "md", "latex")
"""The formats of every document, besides a page."""


def render(document: Document, format: str = "table", *, width: int | None = None, color: bool = False) -> str:
    """The document in one of FORMATS, without a newline at the end.

    `width` and `color` concern the terminal alone; `width` None is the terminal's own. Raises UserError for a format
    that does not exist.
    """
    if format == "table":
        return terminal.render(document, width=width, color=color)
    write = {"json": data.to_json, "csv": data.to_csv, "md": markup.to_markdown, "latex": markup.to_latex}.get(format)
    if write is None:
        raise UserError(f"there is no format '{format}'; choose one of {', '.join(FORMATS)}")
    return write(document)
