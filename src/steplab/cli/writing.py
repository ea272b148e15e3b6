"""Write the report of several records, as `report`, `sweep` and `study` do."""

from typing import TYPE_CHECKING

from steplab.cli.options import FileOptions
from steplab.cli.output import emit, stdout_color

if TYPE_CHECKING:
    from steplab.lab.reporting import ReportedRecords


def write_report(
    selection: "ReportedRecords", chosen: str, out: FileOptions, *, title: str | None = None, named: bool = False
) -> None:
    """Write the records as a page (html) or as tables; what a page says first is printed too.

    `named`: the ids of the records were given.
    """
    from steplab.cli.progress import ProgressLine
    from steplab.views.reporting import answer_of, report_of

    with ProgressLine() as line:
        view = report_of(selection, title=title, named=named, store=out.store, on_progress=line.within)
        text = view.render(chosen, color=stdout_color(out))
    if chosen == "html" and out.output is not None:
        emit(answer_of(selection))
    emit(text, out, chosen)
