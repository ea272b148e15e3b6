"""List stored records: id, time, kind, name, device, and the fields that differ.

For example: steplab list --where "model=small and precision=bf16" --sort step_time_s
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions
from steplab.records.registry import KINDS_IN_LISTS


def list_(
    *,
    kind: Annotated[str | None, Parameter(help=f"Only these kinds: {', '.join(KINDS_IN_LISTS)}; or study")] = None,
    where: Annotated[
        str | None,
        Parameter(help="Conditions on fields of --format json, joined by 'and': = != < <= > >=, ~ (contains)"),
    ] = None,
    study: Annotated[str | None, Parameter(help="Only this study: the beginning of its id, its name, or last")] = None,
    name: Annotated[str | None, Parameter(help="Only records of this name")] = None,
    sort: Annotated[str | None, Parameter(help="Sort by FIELD or FIELD:desc [default: newest first]")] = None,
    columns: Annotated[str | None, Parameter(help="Columns, in order [default: those that differ]")] = None,
    limit: Annotated[int, Parameter(help="Most records to list")] = 40,
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
    found = list_records(store=out.store, kinds=kinds, study=study, name=name, where=where, sort=sort, limit=limit)
    keys = checked_keys(columns, found.rows) if columns else ()
    if kinds == (STUDY,) and not keys:
        document = rows_document(found.rows, empty="no studies")
    else:
        document = list_document(found.rows, keys)
    emit_document(document, chosen, out)
    if not found.rows and any((kind, where, study, name)):
        say("no record matches; `steplab list` without conditions shows all")
    for record_id, unknown_kind in found.unknown:
        say(
            f"record {record_id} has the unknown kind '{plain(unknown_kind)}'; upgrade "
            f"steplab, or remove it: `steplab rm {record_id}`"
        )
    if found.num_left_out:
        say(f"{counted(limit, 'record')} listed of more; raise --limit")
