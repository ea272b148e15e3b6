"""Write the report of several records, as `report` and `study` do."""

from typing import TYPE_CHECKING, Any

from steplab.cli.options import FileOptions
from steplab.cli.output import emit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steplab.lab.reporting import ReportedRecords
    from steplab.report.sections import Sections


def write_report(
    selection: "ReportedRecords", chosen: str, out: FileOptions, *, title: str | None = None, named: bool = False
) -> None:
    """Write the records as a page (html) or as tables. `named`: the ids of the records were given."""
    from steplab.cli.progress import ProgressLine
    from steplab.measurement.progress import Progress

    if chosen == "html":
        from steplab.lab.explaining import findings_of
        from steplab.lab.memory import predictions_of
        from steplab.lab.memory_references import memory_references
        from steplab.lab.planning import plans_of
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
            plans = attempts.draw("plans", runs, plans_of)
            findings = attempts.draw("findings", runs, lambda some: findings_of(some, out.store))
            line.within(Progress(stage="draw", done=0, total=0))
            page = render_page(
                selection.records,
                title=title or selection.title,
                description=selection.description,
                predictions=predictions,
                references=references,
                plans=plans,
                findings=findings,
                attempts=attempts,
            )
        emit(page, out, chosen)
    else:
        emit(_tables(selection, chosen, named=named, to_file=out.output is not None), out, chosen)


def _tables(selection: "ReportedRecords", format: str, *, named: bool, to_file: bool) -> str:
    """The records in a format other than a page.

    Records of a kind that shares one table become that table, every other record a document of its own. Raises
    UserError for several tables in a format for programs, which holds one: of audits beside runs it has the runs.
    """
    from functools import partial

    from steplab.cli.output import stdout_color
    from steplab.errors import SteplabError, UserError
    from steplab.records.registry import KINDS
    from steplab.report.attempts import Attempts
    from steplab.report.kit.rendering import render
    from steplab.report.sections import SECTIONS

    found = {name: selection.of(name) for name in KINDS}
    if found["run"] and not named and format in ("json", "csv"):
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
