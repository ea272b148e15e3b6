"""Show one record in full.

For example: steplab show last --format json
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import FileOptions, PageFormat


def show(
    id: Annotated[str, Parameter(help="Id of the record, its beginning, last, or last~1 for the one before")] = "last",
    /,
    *,
    format: Annotated[
        PageFormat | None,
        Parameter(
            help="Format of the output; json is the whole record with its raw samples, and its figures under "
            "`summary` [default: by the suffix of "
            "--output, else table]"
        ),
    ] = None,
    web: Annotated[
        bool,
        Parameter(
            help="Serve the page to browsers on this machine until Ctrl-C, at an address with a random token",
            negative="",
        ),
    ] = False,
    out: FileOptions = FileOptions(),
) -> None:
    from steplab.cli.output import chosen_format, emit, stdout_color
    from steplab.errors import UserError
    from steplab.views.showing import show as view
    from steplab.views.view import FORMATS

    chosen = chosen_format(format, out, allowed=FORMATS)
    if web and (format or out.output):
        raise UserError("--web serves a page and writes no file; leave --format and --output out")
    shown = view(id, store=out.store)
    if web:
        from steplab.cli.web import serve  # an HTTP server, whose import is a tenth of what `show` takes

        serve(shown.render("html"))
        return
    emit(shown.render(chosen, color=stdout_color(out)), out, chosen)
