"""Show one record in full."""

from typing import Annotated, Literal

from cyclopts import Parameter

from steplab.cli.options import FileOptions


def show(
    id: Annotated[str, Parameter(help="Id of the record, its beginning, or last")] = "last",
    /,
    *,
    format: Annotated[
        Literal["table", "json", "csv", "md", "latex", "html"] | None,
        Parameter(
            help="Format of the output; json is the whole record with its raw samples, and its figures under "
            "`summary` [default: by the suffix of "
            "--output, else table]"
        ),
    ] = None,
    out: FileOptions = FileOptions(),
) -> None:
    from steplab.cli.output import ROW_FORMATS, chosen_format, emit, stdout_color
    from steplab.views.showing import show as view

    chosen = chosen_format(format, out, allowed=(*ROW_FORMATS, "html"))
    shown = view(id, store=out.store)
    emit(shown.render(chosen, color=stdout_color() and out.output is None), out, chosen)
