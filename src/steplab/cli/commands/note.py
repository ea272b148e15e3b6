"""Put a remark on a record, shown by `list` and `show`; it replaces an earlier one.

For example: steplab note last "fan was off"
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import StoreOptions


def note(
    id: Annotated[str, Parameter(help="Beginning of an id, last, or last~1 for the record before")],
    text: Annotated[str, Parameter(help="The remark, on one line;  removes it")],
    /,
    *,
    store: StoreOptions = StoreOptions(),
) -> None:
    from steplab.cli.output import say
    from steplab.lab.keeping import note as write

    record = write(id, text, store=store.store)
    say(f"record {record.id}: {record.comment or 'no note'}")
