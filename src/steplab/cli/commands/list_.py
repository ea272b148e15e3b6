"""List the stored runs, newest first, or with a switch the records of another kind."""

from dataclasses import dataclass, fields
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions
from steplab.records.registry import KINDS

_SWITCHES = {kind.verb: kind.name for kind in KINDS.values() if kind.verb != "run"}
"""The kinds of records other than runs, by the name of the switch that lists them."""


def _with_switches(options: type) -> type:
    """Add a switch for each kind of record to a class that is about to become a dataclass."""
    options.__annotations__ = {}
    for verb, kind in _SWITCHES.items():
        text = f"List the {KINDS[kind].plural} instead of the runs"
        options.__annotations__[verb] = Annotated[bool, Parameter(help=text, negative="")]
        setattr(options, verb, False)
    return options


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
@_with_switches
class KindOptions:
    """The kind of record that is listed instead of runs."""


def list_(
    *,
    study: Annotated[
        str | None, Parameter(help="List the runs of this study alone, given by its id or the beginning of it")
    ] = None,
    name: Annotated[str | None, Parameter(help="List the runs of this name alone")] = None,
    limit: Annotated[int, Parameter(help="Number of records to list, the newest first")] = 40,
    studies: Annotated[bool, Parameter(help="List the sweeps instead of the runs", negative="")] = False,
    kinds: KindOptions = KindOptions(),
    out: OutputOptions = OutputOptions(),
) -> None:
    from steplab.cli.output import chosen_format, emit, say, stdout_color
    from steplab.errors import UserError
    from steplab.lab.keeping import open_store
    from steplab.report.kit.rendering import render
    from steplab.report.kit.text import plain
    from steplab.report.run.columns import rows_document

    if limit < 1:
        raise UserError(f"--limit must be at least 1, not {limit}")
    chosen = chosen_format(out.format, out)
    elsewhere: list[str] = []
    unknown: list[tuple[str, str]] = []
    with open_store(out.store, write=False) as store:
        if studies:
            rows, more = store.studies()[:limit], False
        else:
            study_id = store.study_id(study) if study else None
            asked = [field.name for field in fields(kinds) if getattr(kinds, field.name)]
            kind = _SWITCHES[asked[0]] if asked else "run"
            rows = store.rows(kind=kind, study=study_id, name=name, limit=limit + 1)
            rows, more = rows[:limit], len(rows) > limit
            unknown = store.of_unknown_kind()
            if kind == "run" and not study and (not rows or not name):
                elsewhere = [f"--{verb}" for verb, other in _SWITCHES.items() if store.rows(kind=other, limit=1)]
    emit(render(rows_document(rows), chosen, color=stdout_color() and out.output is None), out, chosen)
    if elsewhere:
        say(f"the store has records of other kinds; {' or '.join(elsewhere)} lists them")
    for record_id, unknown_kind in unknown:
        say(
            f"record {record_id} is of the kind '{plain(unknown_kind)}', which this version does not know; upgrade "
            f"steplab, or `steplab rm {record_id}` removes it"
        )
    if more:
        say(f"showing the newest {limit}; --limit N shows more")
