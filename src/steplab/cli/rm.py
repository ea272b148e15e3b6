"""steplab rm"""

import sys
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import StoreOptions


def rm(
    ids: Annotated[tuple[str, ...], Parameter(help="Records: their ids, or the beginnings of ids")],
    /,
    *,
    yes: Annotated[bool, Parameter(help="Do not ask", negative="")] = False,
    store: StoreOptions = StoreOptions(),
) -> None:
    """Remove records from the store, those too that cannot be read; a study goes with its last record.

    For example: steplab rm ID
    """
    from steplab.cli.output import say
    from steplab.errors import UserError
    from steplab.lab.keeping import open_store
    from steplab.units import counted

    with open_store(store.store, write=False) as opened:
        found = opened.identify(ids)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(f"removing {counted(len(found), 'record')} for good: add --yes where nobody can be asked")
        for row in found:
            say(_described(row))
        say(f"Remove {counted(len(found), 'record')} for good? [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("nothing was removed")
            return
    with open_store(store.store, write=True) as opened:
        studies = opened.remove(str(row["id"]) for row in found)
    for row in found:
        say(f"removed {_described(row)}")
    for study in studies:
        say(f"removed study {study}, which has no record any more")


def _described(row: dict[str, str | int | float | None]) -> str:
    """run 0123456789ab, 'sizes', 2026-11-21T07:30:00Z, ok."""
    called = f" '{row['name']}'," if row["name"] else ""
    line = f"{row['kind']} {row['id']},{called} {row['created_utc']}, {row['status']}"
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
