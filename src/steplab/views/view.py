"""Something to look at: at a prompt, in a notebook, or as a file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.files import Destination, format_of, packed
from steplab.printing import leaving
from steplab.report.kit.rendering import FORMATS as TEXT_FORMATS
from steplab.report.kit.rendering import PAGE

FORMATS = (*TEXT_FORMATS, PAGE)
"""The formats of every view; table is text for a terminal, html a page that needs nothing else."""


@dataclass(frozen=True, slots=True, repr=False)
class View:
    """A report that is written when it is looked at: as text at a prompt, as HTML in a notebook."""

    write: Callable[[str, bool], str]
    """Function that writes it in one of FORMATS, or in `notebook`; the second argument is whether text is coloured."""
    store: Path | str | None = None
    """The store that the records are from, which no file may replace; None: the default store."""

    def __repr__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return leaving(self.write("notebook", False), "html")

    def render(self, format: str = "table", *, color: bool = False) -> str:
        """The report in one of FORMATS. Raises UserError for another format, or one that does not suit it."""
        if format not in FORMATS:
            raise UserError(f"there is no format '{format}'; choose one of {', '.join(FORMATS)}")
        return leaving(self.write(format, color), format, colored=color)

    def save(self, path: Path | str, format: str | None = None, *, force: bool = False) -> Path:
        """Write the report to a file, in the format of its suffix (page.html, rows.csv.gz) unless one is named.

        A file that does not name steplab as its writer is replaced only with `force`, and the store never.
        Raises UserError for such a file, and SteplabError where writing fails.
        """
        target = Path(path)
        chosen = format or format_of(target)
        if chosen is None:
            raise UserError(f"the name {target.name} does not say a format; choose one of {', '.join(FORMATS)}")
        destination = Destination(path=target, store=self.store, force=force)
        destination.check()
        text = self.render(chosen)
        with destination.writing() as file, packed(file, target) as written:
            written.write(f"{text.rstrip(chr(10))}\n".encode())
        return target
