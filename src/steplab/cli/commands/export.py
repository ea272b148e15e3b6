"""Export records for another machine or another program.

For example: steplab export --format perfetto ID --output step.json
"""

from typing import Annotated, Literal

from cyclopts import Parameter

from steplab.cli.options import FileOptions


def export(
    ids: Annotated[
        tuple[str, ...],
        Parameter(help="Ids of records, or their beginnings [default: all records]", show_default=False),
    ] = (),
    /,
    *,
    study: Annotated[str | None, Parameter(help="Export the records of this study")] = None,
    format: Annotated[
        Literal["jsonl", "csv", "perfetto"] | None,
        Parameter(
            help="Format: jsonl (whole records, for `steplab import`), csv (one row of figures per run) or perfetto "
            "(the timeline of one profiled run, for ui.perfetto.dev) [default: by the suffix of --output, else jsonl]"
        ),
    ] = None,
    out: FileOptions = FileOptions(),
) -> None:
    from steplab.cli.output import chosen_format, emit
    from steplab.errors import UserError
    from steplab.lab.keeping import open_store
    from steplab.records.codec import encode_with_summary
    from steplab.records.rows import run_row
    from steplab.records.run import Run
    from steplab.report.kit.rendering import render
    from steplab.report.run.columns import rows_document

    chosen = chosen_format(format, out, allowed=("jsonl", "csv", "perfetto"))
    with open_store(out.store, write=False) as opened:
        if chosen == "perfetto":
            emit(_timeline(opened.get(_only(ids))), out, chosen)
            return
        study_id = opened.study_id(study) if study else None
        records = opened.records(ids) if ids else opened.iterate(study=study_id, all_attempts=True)
        if chosen == "jsonl":
            emit("".join(encode_with_summary(record).decode() + "\n" for record in records), out, chosen)
        else:
            every = list(records)
            runs = [record for record in every if isinstance(record, Run)]
            if ids and len(runs) < len(every):
                raise UserError(
                    f"csv has one row per run, and {len(every) - len(runs)} of these records are not runs; take "
                    "--format jsonl, which holds every kind, or `steplab report ID --format csv` for a single record"
                )
            emit(render(rows_document([run_row(run) for run in runs]), "csv"), out, chosen)


def _only(ids: tuple[str, ...]) -> str:
    """The only id; raises UserError for none or several."""
    from steplab.errors import UserError

    if len(ids) != 1:
        raise UserError(
            f"--format perfetto takes the id of one run, not {len(ids) or 'all records'}; `steplab list` shows the ids"
        )
    return ids[0]


def _timeline(record: object) -> str:
    """The timeline of a run in Perfetto's format."""
    from steplab.errors import UserError
    from steplab.records.run import Run
    from steplab.report.perfetto import chrome_trace

    if not isinstance(record, Run):
        raise UserError("this record is not a run, so it has no timeline; `steplab list` shows the runs")
    return chrome_trace(record)
