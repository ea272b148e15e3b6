"""Put a remark on a record, which `list` and `show` repeat; it replaces an earlier one.

For example: steplab note last "fan was off"
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import StoreOptions


def note(
    id: Annotated[str, Parameter(help="Id of the record, its beginning, last, or last~1 for the one before")],
    text: Annotated[str, Parameter(help="The remark, in one line; an empty one removes it")],
    /,
    *,
    store: StoreOptions = StoreOptions(),
) -> None:
    from steplab.cli.output import say
    from steplab.lab.keeping import note as write

    record = write(id, text, store=store.store)
    say(f"record {record.id}: {record.comment or 'no note'}")
