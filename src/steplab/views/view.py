"""A report for a prompt, a notebook or a file."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.files import Destination, format_of, packed
from steplab.printing import leaving
from steplab.report.kit.pictures import Beside
from steplab.report.kit.rendering import FORMATS as TEXT_FORMATS
from steplab.report.kit.rendering import PAGE, PICTURE, PICTURED

FORMATS = (*TEXT_FORMATS, PAGE, PICTURE)
"""Formats of every view: table is terminal text, html a self-contained page, svg its first picture."""


@dataclass(frozen=True, slots=True, repr=False)
class View:
    """A report, written when looked at: text at a prompt, HTML in a notebook."""

    write: Callable[..., str]
    """Makes the text from a format, or `notebook`, and the use of colours; if `pictured`, also from the taker of
    pictures and long tables.
    """
    store: Path | str | None = None
    """Store of the records, which no file may replace; None: the default store."""
    pictured: bool = False
    """True if pictures and long tables of md and latex are separate files."""

    def __repr__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return leaving(self.write("notebook", False), "html")

    def render(self, format: str = "table", *, color: bool = False) -> str:
        """The report in one of FORMATS. Raises UserError for an unknown or unsuitable format."""
        if format not in FORMATS:
            raise UserError(f"unknown format '{format}'; use one of {', '.join(FORMATS)}")
        return leaving(self.write(format, color), format, colored=color)

    def save(self, path: Path | str, format: str | None = None, *, force: bool = False) -> Path:
        """Write the report to a file, in the named format or its suffix's (page.html, rows.csv.gz).

        Pictures and long tables of Markdown and LaTeX go to the folder NAME_md or NAME_tex next to it. Files of other
        writers are replaced only with `force`, the store never. Raises UserError for these, SteplabError if writing
        fails.
        """
        target = Path(path)
        chosen = format or format_of(target)
        if chosen is None:
            raise UserError(f"unknown format for {target.name}; use one of {', '.join(FORMATS)}")
        destination = Destination(path=target, store=self.store, force=force)
        destination.check()
        suffix, kind = ("tex", "pdf") if chosen == "latex" else ("md", "svg")
        beside = Beside(f"{target.name.partition('.')[0]}_{suffix}", kind)
        own = force or target.exists()  # what lies beside a file of steplab's is steplab's
        if self.pictured and chosen in PICTURED and not destination.is_written_to:
            text = leaving(self.write(chosen, False, beside), chosen)
        else:
            text = self.render(chosen)
        with ExitStack() as undo:  # what a failure leaves half done
            for name, content in beside.files.items():
                path = target.parent / name
                if not path.parent.exists():
                    path.parent.mkdir()
                    undo.callback(path.parent.rmdir)
                if not path.exists():
                    undo.callback(path.unlink, missing_ok=True)
                Destination(path=path, store=self.store, force=own).write(content)
            with destination.writing() as file, packed(file, target) as written:
                written.write(f"{text.rstrip(chr(10))}\n".encode())
            undo.pop_all()
        return target
