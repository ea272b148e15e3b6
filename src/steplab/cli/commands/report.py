"""Report records as tables, or as one self-contained page with charts.

Without ids, a study or a name, the newest record is reported: a run with its whole study, a run without a study with
all such runs, and a benchmark (of attention, collectives or data parallelism) by itself.

For example: steplab report --output page.html
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steplab.cli.options import FileOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steplab.lab.reporting import ReportedRecords
    from steplab.report.sections import Sections


def report(
    ids: Annotated[
        tuple[str, ...],
        Parameter(
            help="Records to report: ids, beginnings of ids, or names that belong to a single record",
            show_default=False,
        ),
    ] = (),
    /,
    *,
    study: Annotated[str | None, Parameter(help="Report this study")] = None,
    name: Annotated[str | None, Parameter(help="Report all runs of this name")] = None,
    title: Annotated[str | None, Parameter(help="Title of the page")] = None,
    format: Annotated[
        Literal["table", "json", "csv", "md", "latex", "html"] | None,
        Parameter(help="Format of the output [default: by the suffix of --output, else table]"),
    ] = None,
    out: FileOptions = FileOptions(),
) -> None:
    from steplab.cli.output import ROW_FORMATS, chosen_format, emit
    from steplab.cli.progress import ProgressLine
    from steplab.lab.reporting import records_to_report
    from steplab.measurement.progress import Progress

    chosen = chosen_format(format, out, allowed=(*ROW_FORMATS, "html"))
    selection = records_to_report(ids, study=study, name=name, store=out.store)
    if chosen == "html":
        from steplab.lab.explaining import findings_of
        from steplab.lab.memory import predictions_of
        from steplab.lab.memory_references import memory_references
        from steplab.report.attempts import Attempts
        from steplab.report.memory.document import watched_in_full
        from steplab.report.page import render_page
        from steplab.report.run.cells import cells_of

        attempts = Attempts()
        runs = selection.of("run")
        with ProgressLine() as line:
            watched = attempts.draw("memory", runs, lambda some: [c.run for c in watched_in_full(cells_of(some))])
            predictions = attempts.draw("predictions", watched, lambda some: predictions_of(some, line.within))
            references = attempts.draw("comparisons", watched, lambda some: memory_references(some, out.store))
            findings = attempts.draw("findings", runs, lambda some: findings_of(some, out.store))
            line.within(Progress(stage="draw", done=0, total=0))
            page = render_page(
                selection.records,
                title=title or selection.title,
                description=selection.description,
                predictions=predictions,
                references=references,
                findings=findings,
                attempts=attempts,
            )
        emit(page, out, chosen)
    else:
        emit(_tables(selection, chosen, named=bool(ids), to_file=out.output is not None), out, chosen)


def _tables(selection: "ReportedRecords", format: str, *, named: bool, to_file: bool) -> str:
    """The records in a format other than a page.

    Records of a kind that shares one table become that table, every other record a document of its own. Raises
    UserError for several tables in a format for programs, which holds one. Audits beside runs are left to the page
    unless their ids were given.
    """
    from functools import partial

    from steplab.cli.output import stdout_color
    from steplab.errors import SteplabError, UserError
    from steplab.records.registry import KINDS
    from steplab.report.attempts import Attempts
    from steplab.report.kit.rendering import render
    from steplab.report.sections import SECTIONS

    found = {name: selection.of(name) for name in KINDS}
    if found["run"] and not named:
        found["numerics"] = ()
    tables = sum(bool(records) if SECTIONS[name].together else len(records) for name, records in found.items())
    if format in ("json", "csv") and tables > 1:
        raise UserError(
            f"--format {format} holds one table, and these records have several; name the id of one record, or take "
            "--format table, md, latex or html"
        )
    draw, color = Attempts().draw, stdout_color() and not to_file

    def texts(kind: "Sections", records: "Sequence[Any]") -> list[str]:
        documents = kind.documents(records) if records else []
        return [render(document, format, color=color) for document in documents]

    made = [
        text for name, records in found.items() for text in draw("the report", records, partial(texts, SECTIONS[name]))
    ]
    if not made:
        raise SteplabError("none of these records can be reported; --debug shows why")
    return "\n\n".join(text.rstrip("\n") for text in made)
