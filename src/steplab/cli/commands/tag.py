"""Tag a record with words, for `steplab list --where tags~WORD`.

For example: steplab tag last baseline
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import StoreOptions


def tag(
    id: Annotated[str, Parameter(help="Beginning of an id, last, or last~1 for the record before")],
    tags: Annotated[tuple[str, ...], Parameter(help="Words to add", show_default=False)] = (),
    /,
    *,
    remove: Annotated[str | None, Parameter(help="Tags to remove, separated by commas")] = None,
    store: StoreOptions = StoreOptions(),
) -> None:
    from steplab.cli.output import say
    from steplab.errors import UserError
    from steplab.lab.keeping import tag as put

    if not tags and not remove:
        raise UserError("no tag to add or remove; add WORD, or --remove WORD")
    record = put(id, tags, remove=remove.split(",") if remove else (), store=store.store)
    say(f"record {record.id}: {', '.join(record.tags) or 'no tags'}")
