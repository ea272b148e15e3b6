"""Show one record in full.

For example: steplab show last --format json
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import FileOptions, PageFormat


def show(
    id: Annotated[str, Parameter(help="Beginning of an id, last, or last~1 for the record before")] = "last",
    /,
    *,
    format: Annotated[
        PageFormat | None,
        Parameter(
            help="Format; json: the record with raw samples and `summary` [default: by --output's suffix, else table]"
        ),
    ] = None,
    out: FileOptions = FileOptions(),
) -> None:
    from steplab.cli.output import chosen_format, emit, stdout_color
    from steplab.views import view

    chosen = chosen_format(format, out, allowed=view.FORMATS)
    emit(view.show(id, store=out.store).render(chosen, color=stdout_color(out)), out, chosen)
