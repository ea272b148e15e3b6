"""steplab report"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steplab.cli.options import FileOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from steplab.lab.reporting import Selection
    from steplab.records.numerics import Numerics
    from steplab.records.run import Run


def report(
    ids: Annotated[
        tuple[str, ...], Parameter(help="Records to report: ids, beginnings of ids, or names that one alone has")
    ] = (),
    /,
    *,
    study: Annotated[str | None, Parameter(help="Report this study")] = None,
    name: Annotated[str | None, Parameter(help="Report all runs of this name")] = None,
    title: Annotated[str | None, Parameter(help="Title of the page")] = None,
    format: Annotated[
        Literal["table", "json", "csv", "md", "latex", "html"] | None,
        Parameter(help="[default: by --output's ending, else table]"),
    ] = None,
    out: FileOptions = FileOptions(),
) -> None:
    """Report runs as tables, or as one self-contained page with pictures.

    Without ids, a study or a name: what was measured last, with the study that it belongs to. A run that belongs to
    none is reported with all such runs; a benchmark (of attention, of collectives, of data parallelism) by itself.

    For example: steplab report --output page.html
    """
    from steplab.cli.output import ROW_FORMATS, chosen_format, emit
    from steplab.cli.progress import ProgressLine
    from steplab.lab.reporting import records_to_report
    from steplab.measurement.progress import Progress

    chosen = chosen_format(format, out, allowed=(*ROW_FORMATS, "html"))
    selection = records_to_report(ids, study=study, name=name, store=out.store)
    if chosen == "html":
        from steplab.lab.memory import predictions_of
        from steplab.lab.memory_references import memory_references
        from steplab.report.attempts import Attempts
        from steplab.report.html import render_page

        attempts = Attempts()
        runs = selection.of("run")
        with ProgressLine() as line:
            predictions = attempts.draw("predictions", runs, lambda some: predictions_of(some, line.within))
            references = attempts.draw("comparisons", runs, lambda some: memory_references(some, out.store))
            line.within(Progress(stage="draw", done=0, total=0))
            page = render_page(
                selection.of("run"),
                title=title or selection.title,
                description=selection.description,
                predictions=predictions,
                references=references,
                numerics=selection.of("numerics"),
                attention=selection.of("attention"),
                comm=selection.of("comm"),
                ddp=selection.of("ddp"),
                attempts=attempts,
            )
        emit(page, out, chosen)
    else:
        emit(_tables(selection, chosen, named=bool(ids), to_file=out.output is not None), out, chosen)


def _tables(selection: "Selection", format: str, *, named: bool, to_file: bool) -> str:
    """Runs as rows, and each benchmark after them. Raises UserError where a format that programs read takes one alone.

    Audits beside runs stand on the page alone, unless they were asked for by their ids.
    """
    from steplab.cli.output import stdout_color
    from steplab.cli.precision import render_audits
    from steplab.errors import SteplabError, UserError
    from steplab.records.rows import run_row
    from steplab.report.attempts import Attempts
    from steplab.report.attention_text import render_attention
    from steplab.report.comm_text import render_comm
    from steplab.report.ddp_text import render_ddp
    from steplab.report.formats import render_rows

    color = stdout_color() and not to_file
    audits = bool(selection.of("numerics")) and (named or not selection.of("run"))
    benchmarks = len(selection.of("attention")) + len(selection.of("comm")) + len(selection.of("ddp"))
    if format in ("json", "csv") and bool(selection.of("run")) + audits + benchmarks > 1:
        raise UserError(
            f"{format} holds runs alone, or one benchmark: these records are of several tables; name fewer, or take "
            "--format table, md, latex or html"
        )
    draw = Attempts().draw

    def table(runs: "Sequence[Run]") -> list[str]:
        return [render_rows([run_row(run) for run in runs], format, color=color)] if runs else []

    def audit_tables(numerics: "Sequence[Numerics]") -> list[str]:
        return [render_audits(numerics, format, to_file=to_file)] if numerics else []

    def each(render: "Callable[..., str]") -> "Callable[[Sequence[Any]], list[str]]":
        return lambda some: [render(record, format, color=color) for record in some]

    texts = [
        *draw("the table of runs", selection.of("run"), table),
        *draw("the table of audits", selection.of("numerics") if audits else (), audit_tables),
        *draw("the report", selection.of("attention"), each(render_attention)),
        *draw("the report", selection.of("comm"), each(render_comm)),
        *draw("the report", selection.of("ddp"), each(render_ddp)),
    ]
    if not texts:
        raise SteplabError("none of these records can be reported; --debug shows why")
    return "\n\n".join(text.rstrip("\n") for text in texts)
