"""Add exported records to the store, all or none; records already stored stay unchanged.

An invalid record is refused; the error names its line and field.

For example: steplab import records.jsonl
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import StoreOptions


def import_(
    files: Annotated[
        tuple[Path, ...],
        Parameter(help="JSONL files from `steplab export`, also .gz or .xz; - is stdin", allow_leading_hyphen=True),
    ],
    /,
    *,
    store: StoreOptions = StoreOptions(),
) -> None:
    from steplab.cli.output import say
    from steplab.lab.keeping import import_files
    from steplab.units import counted

    added, already = import_files(files, store.store)
    say(f"{counted(added, 'record')} added, {already} {'was' if already == 1 else 'were'} already in the store")
