"""Report records as tables, or as one self-contained page with charts.

Default: the newest record; a run comes with its study, or with all runs outside studies.

For example: steplab report --output page.html

Answers to questions: steplab report --questions assignment --output answers.html

One picture: steplab report --chapter "Step time" --output times.svg
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import PageOptions


def report(
    ids: Annotated[tuple[str, ...], Parameter(help="Ids, names, tags, studies or revisions", show_default=False)] = (),
    /,
    *,
    study: Annotated[str | None, Parameter(help="Report this study")] = None,
    name: Annotated[str | None, Parameter(help="Report all runs of this name")] = None,
    title: Annotated[str | None, Parameter(help="Title of the page")] = None,
    questions: Annotated[
        str | None, Parameter(help="Answer these questions, by default from all records: assignment, or a file")
    ] = None,
    chapter: Annotated[str | None, Parameter(help="Only the chapter, section or question that begins so")] = None,
    out: PageOptions = PageOptions(),
) -> None:
    from steplab.cli.output import chosen_format, write_report, write_view
    from steplab.lab.choosing import records_to_report
    from steplab.views.reporting import report as view_of

    chosen = chosen_format(out.format, out)
    if questions:
        view = view_of(ids, study=study, name=name, title=title, questions=questions, chapter=chapter, store=out.store)
        write_view(view, chosen, out)
        return
    selection = records_to_report(ids, study=study, name=name, store=out.store)
    write_report(selection, chosen, out, title=title, named=bool(ids), chapter=chapter)
