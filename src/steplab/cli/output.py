"""Data goes to stdout or a file, remarks go to stderr."""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steplab.cli.options import FileOptions, PageOptions
from steplab.errors import SteplabError, UserError
from steplab.lab.files import Destination, format_of, packed, refuse_the_same
from steplab.printing import leaving
from steplab.printing import say as say
from steplab.report.kit.rendering import FORMATS, PAGE, PICTURE, render

if TYPE_CHECKING:
    from steplab.lab.choosing import ReportedRecords
    from steplab.report.kit.document import Document
    from steplab.views.view import View


def chosen_format(
    format: str | None, out: FileOptions, allowed: Sequence[str] = (), *, beside: Sequence[Path | None] = ()
) -> str:
    """The format of --format, else of --output's suffix, else the first allowed.

    `allowed` defaults to FORMATS, plus PAGE and PICTURE for commands that write pages. Call it before the work begins:
    it raises UserError for a format that the command does not write, and if --output or a file in `beside` must not be
    replaced. It raises SteplabError for a file that cannot be created.
    """
    allowed = allowed or ((*FORMATS, PAGE, PICTURE) if isinstance(out, PageOptions) else FORMATS)
    output = out.output
    ending = format_of(output) if output else None
    if output and output.suffix and not ending and not format:
        raise UserError(f"unknown format {output.suffix}; set --format to one of {', '.join(allowed)}")
    chosen = format or ending or allowed[0]
    if chosen not in allowed:
        page = "; `steplab report` writes pages" if chosen == "html" else ""
        raise UserError(f"this command does not write {chosen}; choose one of {', '.join(allowed)}{page}")
    if output:
        if isinstance(out, PageOptions) and out.in_folder:
            with contextlib.suppress(OSError):  # the check says why
                output.parent.mkdir(exist_ok=True)
        _destination(output, out).check()
        refuse_the_same(*beside, output)
    return chosen


def emit(text: str | Iterable[str], out: FileOptions | None = None, kind: str = "table") -> None:
    """Print the text, or write it to --output completely or not at all.

    A long text may come in pieces of whole lines. Control characters are escaped (steplab.printing); a name ending in
    .gz compresses. `kind` is the text's format. Raises as `chosen_format`, and SteplabError if writing fails.
    """
    pieces = (text if text.endswith("\n") else f"{text}\n",) if isinstance(text, str) else text
    colored = stdout_color(out)
    clean = (leaving(piece, kind, colored=colored) for piece in pieces)
    if out is None or out.output is None:
        for piece in clean:
            _print(piece)
        return
    with _destination(out.output, out).writing() as file, packed(file, out.output) as target:
        for piece in clean:
            target.write(piece.encode())
    say(f"wrote {out.output}")


def emit_document(document: "Document", chosen: str, out: FileOptions, *, stored: str = "") -> None:
    """Print the document, or write it to --output. Errors name the `stored` ids, so that no measurement seems lost."""
    try:
        emit(render(document, chosen, color=stdout_color(out)), out, chosen)
    except SteplabError as error:
        if not stored:
            raise
        raise type(error)(f"{error}; the measurement is stored: `steplab show {stored}`") from error


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SteplabError(f"cannot write to stdout: {error.strerror}") from error


def _destination(path: Path, out: FileOptions) -> Destination:
    return Destination(path=path, store=out.store, force=out.force)


def say_stored(what: str, record_id: str) -> None:
    say(f"{what} {record_id}; `steplab report {record_id} --output page.html` draws it")


def stdout_color(out: FileOptions | None) -> bool:
    """True if colors are allowed: the output is a terminal, TERM is not dumb, and NO_COLOR is unset."""
    if out is not None and out.output is not None:
        return False
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write_report(
    selection: "ReportedRecords",
    chosen: str,
    out: FileOptions,
    *,
    title: str | None = None,
    named: bool = False,
    chapter: str | None = None,
) -> None:
    """Write the records as tables or as a page (html, or md and latex in a file); the verdict of a page is printed too.

    `named`: the user gave the ids.
    """
    from steplab.cli.progress import ProgressLine
    from steplab.views.reporting import answer_of, report_of

    with ProgressLine() as line:
        view = report_of(selection, title=title, named=named, chapter=chapter, store=out.store, on_progress=line.within)
        text = _saved(view, chosen, out)
    if chosen == "html" and out.output is not None:
        emit(answer_of(selection))
    _end(text, chosen, out)


def write_view(view: "View", chosen: str, out: FileOptions) -> None:
    _end(_saved(view, chosen, out), chosen, out)


def _saved(view: "View", chosen: str, out: FileOptions) -> str:
    if out.output is None:
        return view.render(chosen, color=stdout_color(out))
    view.save(out.output, chosen, force=out.force)
    return ""


def _end(text: str, chosen: str, out: FileOptions) -> None:
    if out.output is None:
        emit(text, out, chosen)
    else:
        say(f"wrote {out.output}")
