"""List stored records: id, time, kind, name and device, then the fields in which they differ.

For example: steplab list --where "model=small and precision=bf16" --sort step_time_s
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions
from steplab.records.registry import KINDS_IN_LISTS


def list_(
    *,
    kind: Annotated[
        str | None,
        Parameter(help=f"List records of these kinds alone: {', '.join(KINDS_IN_LISTS)}; or study, the studies"),
    ] = None,
    where: Annotated[
        str | None,
        Parameter(
            help="Conditions on fields, joined by 'and': = != < <= > >=, and ~ for a text that contains another. The "
            "fields are those of --format json"
        ),
    ] = None,
    study: Annotated[
        str | None,
        Parameter(help="List the records of this study alone: its id or the beginning of it, its name, or last"),
    ] = None,
    name: Annotated[str | None, Parameter(help="List the records of this name alone")] = None,
    since: Annotated[
        str | None, Parameter(help="List what was measured since a date, a time or an age: 2h, 3d")
    ] = None,
    sort: Annotated[
        str | None, Parameter(help="Sort by this field: FIELD or FIELD:desc [default: the newest first]")
    ] = None,
    columns: Annotated[
        str | None, Parameter(help="Show these fields alone, in this order [default: what tells the records apart]")
    ] = None,
    limit: Annotated[int, Parameter(help="Number of records to list")] = 40,
    out: OutputOptions = OutputOptions(),
) -> None:
    from steplab.cli.output import chosen_format, emit_document, say
    from steplab.errors import UserError
    from steplab.lab.listing import STUDY, checked_keys, list_records
    from steplab.printing import plain
    from steplab.report.run.columns import list_document, rows_document
    from steplab.units import counted

    if limit < 1:
        raise UserError(f"--limit must be at least 1, not {limit}")
    chosen = chosen_format(out.format, out)
    kinds = tuple(part.strip() for part in kind.split(",")) if kind else ()
    found = list_records(
        store=out.store,
        kinds=kinds,
        study=study,
        name=name,
        where=where,
        since=since,
        sort=sort,
        limit=limit,
    )
    keys = checked_keys(columns, found.rows) if columns else ()
    if kinds == (STUDY,) and not keys:
        document = rows_document(found.rows, empty="no studies")
    else:
        document = list_document(found.rows, keys)
    emit_document(document, chosen, out)
    if not found.rows and any((kind, where, study, name, since)):
        say("no record matches; `steplab list` without conditions shows what there is")
    for record_id, unknown_kind in found.unknown:
        say(
            f"record {record_id} is of the kind '{plain(unknown_kind)}', which this version does not know; upgrade "
            f"steplab, or `steplab rm {record_id}` removes it"
        )
    if found.num_left_out:
        say(f"{counted(limit, 'record')} listed, and there are more; --limit N lists them")
