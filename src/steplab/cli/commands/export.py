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
    from steplab.errors import UserError
    from steplab.lab.choosing import refuse_several

    refuse_several({"ids": bool(ids), "a study": study is not None})
    if tracker:
        if format or out.output:
            raise UserError("--tracker excludes --format and --output; run the command twice")
        _track(ids, study, tracker, out)
        return
    from steplab.cli.output import chosen_format, emit
    from steplab.lab.choosing import records_of
    from steplab.lab.keeping import open_store
    from steplab.records.codec import encode_with_summary

    chosen = chosen_format(format, out, allowed=("jsonl",))
    with open_store(out.store, write=False) as opened:
        study_id = opened.study_id(study) if study else None
        records = records_of(opened, ids) if ids else opened.iterate(study=study_id, all_attempts=True)
        emit((encode_with_summary(record).decode() + "\n" for record in records), out, chosen)


def _track(ids: tuple[str, ...], study: str | None, tracker: str, out: FileOptions) -> None:
    from steplab.cli.output import say
    from steplab.cli.progress import ProgressLine
    from steplab.integrations.tracking import track, tracked
    from steplab.lab.choosing import records_of
    from steplab.lab.keeping import open_store
    from steplab.units import counted
    from steplab.views.reporting import report

    with open_store(out.store, write=False) as opened:
        study_id = opened.study_id(study) if study else None
        records = list(records_of(opened, ids) if ids else opened.iterate(study=study_id, all_attempts=True))
    places = []
    with ProgressLine() as line:
        for record in records:
            page = report(record, store=out.store, on_progress=line.within).render("html")
            places.append(track(tracked(record, page), tracker))
    for place in dict.fromkeys(places):
        say(f"exported {counted(places.count(place), 'record')} to {place}")
