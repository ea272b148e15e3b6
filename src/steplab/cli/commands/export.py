"""Export records to a file for `steplab import`, or to an experiment tracker.

For example: steplab export --output records.jsonl
"""

from typing import Annotated, Literal

from cyclopts import Parameter

from steplab.cli.options import FileOptions


def export(
    ids: Annotated[
        tuple[str, ...],
        Parameter(help="Ids, names, tags, studies or revisions [default: all records]", show_default=False),
    ] = (),
    /,
    *,
    study: Annotated[str | None, Parameter(help="Export the records of this study")] = None,
    format: Annotated[Literal["jsonl"] | None, Parameter(help="JSON lines, whatever --output's suffix")] = None,
    tracker: Annotated[
        Literal["mlflow", "wandb"] | None,
        Parameter(
            help="Tracker: mlflow (MLFLOW_TRACKING_URI's server), wandb (a folder for `wandb sync`, "
            "or its server with WANDB_MODE=online)"
        ),
    ] = None,
    out: FileOptions = FileOptions(),
) -> None:
    from steplab.cli.output import chosen_format, emit, say
    from steplab.cli.progress import ProgressLine
    from steplab.errors import UserError
    from steplab.lab.choosing import records_of, refuse_several
    from steplab.lab.keeping import open_store
    from steplab.records.codec import encode_with_summary
    from steplab.units import counted

    refuse_several({"ids": bool(ids), "a study": study is not None})
    if tracker and (format or out.output):
        raise UserError("--tracker excludes --format and --output; run the command twice")
    chosen = chosen_format(format, out, allowed=("jsonl",))
    with open_store(out.store, write=False) as opened:
        study_id = opened.study_id(study) if study else None
        records = records_of(opened, ids) if ids else opened.iterate(study=study_id, all_attempts=True)
        if not tracker:
            emit((encode_with_summary(record).decode() + "\n" for record in records), out, chosen)
            return
        held = list(records)
    from steplab.integrations.tracking import track, tracked
    from steplab.views.reporting import report

    places = []
    with ProgressLine() as line:
        for record in held:
            page = report(record, store=out.store, on_progress=line.within).render("html")
            places.append(track(tracked(record, page), tracker))
    for place in dict.fromkeys(places):
        say(f"exported {counted(places.count(place), 'record')} to {place}")
