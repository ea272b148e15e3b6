"""steplab list"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions

_OTHERS = {"--attention": "attention", "--comm": "comm", "--ddp": "ddp", "--precision": "numerics"}
"""Switches, and the kinds of records that they list in place of runs."""


def list_(
    *,
    study: Annotated[str | None, Parameter(help="Only this study's runs (the beginning of its id will do)")] = None,
    name: Annotated[str | None, Parameter(help="Only runs of this name")] = None,
    limit: Annotated[int, Parameter(help="The newest N")] = 40,
    studies: Annotated[bool, Parameter(help="List the sweeps instead of the runs", negative="")] = False,
    attention: Annotated[
        bool, Parameter(help="List the benchmarks of attention instead of the runs", negative="")
    ] = False,
    comm: Annotated[
        bool, Parameter(help="List the benchmarks of collectives instead of the runs", negative="")
    ] = False,
    ddp: Annotated[bool, Parameter(help="List the data-parallel studies instead of the runs", negative="")] = False,
    precision: Annotated[
        bool, Parameter(help="List what `precision` saw, audits and sums, instead of the runs", negative="")
    ] = False,
    out: OutputOptions = OutputOptions(),
) -> None:
    """List stored runs, or with a switch other records, the newest first."""
    from steplab.cli.output import chosen_format, emit, say, stdout_color
    from steplab.errors import UserError
    from steplab.lab.keeping import open_store
    from steplab.report.kit.rendering import render
    from steplab.report.kit.text import plain
    from steplab.report.run.columns import rows_document

    if limit < 1:
        raise UserError(f"--limit must be at least 1, not {limit}")
    elsewhere: list[str] = []
    unknown: list[tuple[str, str]] = []
    with open_store(out.store, write=False) as store:
        if studies:
            rows, more = store.studies()[:limit], False
        else:
            study_id = store.study_id(study) if study else None
            asked = {"attention": attention, "comm": comm, "ddp": ddp, "numerics": precision}
            kind = next((kind for kind, wanted in asked.items() if wanted), "run")
            rows = store.rows(kind=kind, study=study_id, name=name, limit=limit + 1)
            rows, more = rows[:limit], len(rows) > limit
            unknown = store.of_unknown_kind()
            if kind == "run" and not study and (not rows or not name):
                elsewhere = [switch for switch, other in _OTHERS.items() if store.rows(kind=other, limit=1)]
    chosen = chosen_format(out.format, out.output)
    emit(render(rows_document(rows), chosen, color=stdout_color() and out.output is None), out.output)
    if elsewhere:
        say(f"the store has other records; {' or '.join(elsewhere)} lists them")
    for record_id, unknown_kind in unknown:
        say(
            f"record {record_id} is of the kind '{plain(unknown_kind)}', which this version does not know; upgrade "
            f"steplab, or `steplab rm {record_id}` removes it"
        )
    if more:
        say(f"the newest {limit}; --limit shows more")
