"""Show one record in full."""

from dataclasses import replace
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
    from steplab.lab.explaining import findings_of
    from steplab.lab.keeping import open_store
    from steplab.lab.memory_references import memory_references
    from steplab.records.codec import encode_with_summary
    from steplab.records.registry import kind_of
    from steplab.records.run import Run
    from steplab.report.kit import html
    from steplab.report.kit.rendering import render
    from steplab.report.run.words import annotations
    from steplab.report.sections import SECTIONS, Context

    chosen = chosen_format(format, out, allowed=(*ROW_FORMATS, "html"))
    with open_store(out.store, write=False) as opened:
        record = opened.get(id)
    if chosen == "json":
        emit(encode_with_summary(record).decode(), out, chosen)
        return
    context = Context()
    if isinstance(record, Run):
        context = Context(references=memory_references([record], out.store), findings=findings_of([record], out.store))
    document = SECTIONS[kind_of(record).name].document(record, context)
    document = replace(document, subtitle="\n".join((document.subtitle, *annotations(record))))
    color = stdout_color() and out.output is None
    emit(html.to_html(document) if chosen == "html" else render(document, chosen, color=color), out, chosen)
