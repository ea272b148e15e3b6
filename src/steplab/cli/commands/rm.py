"""Remove records from the store, also unreadable ones; a study goes with its last record.

For example: steplab rm ID
"""

import sys
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import StoreOptions


def rm(
    ids: Annotated[tuple[str, ...], Parameter(help="Ids of records, or their beginnings")],
    /,
    *,
    yes: Annotated[bool, Parameter(help="Remove without confirmation")] = False,
    store: StoreOptions = StoreOptions(),
) -> None:
    from steplab.cli.output import say
    from steplab.errors import UserError
    from steplab.lab.keeping import open_store
    from steplab.units import counted

    with open_store(store.store, write=False) as opened:
        found = opened.identify(ids)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(
                f"removing {counted(len(found), 'record')} for good needs confirmation, but stdin is not a "
                "terminal; add --yes"
            )
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
        say(f"removed study {study}, which has no records left")


def _described(row: dict[str, str | int | float | None]) -> str:
    called = f" '{row['name']}'," if row["name"] else ""
    line = f"{row['kind']} {row['id']},{called} {row['created_utc']}, {row['status']}"
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
