"""Check and back up the store, the file that holds all records.

For example: steplab store check
"""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from steplab.cli.options import StoreOptions

store = App(name="store", help_format="plaintext")


@store.command
def check(*, options: StoreOptions = StoreOptions()) -> int:
    """Check the store's file and read each record; nothing is changed.

    Exit code 1: something is damaged.

    For example: steplab store check
    """
    from steplab.cli.output import emit
    from steplab.cli.progress import ProgressLine
    from steplab.lab.keeping import check_store
    from steplab.measurement.progress import Progress
    from steplab.units import counted, format_bytes

    with ProgressLine() as line:
        line.within(Progress(stage="check", done=0, total=0))
        found = check_store(options.store)
    where = f" on a network file system ({found.file_system})" if found.file_system else ""
    free = f", {format_bytes(found.free_bytes)} of them free" if found.free_bytes else ""
    size = f"{format_bytes(found.size_bytes)}{free}"
    told = [
        f"{found.path}: {counted(found.num_records, 'record')}, {size}, format {found.format}, "
        f"journal mode {found.journal}{where}",
        *(f"SQLite: {line}" for line in found.damage),
        *found.records,
    ]
    if found.damage:
        told.append(f"The file is damaged; `sqlite3 {found.path} .recover | sqlite3 new.db` recovers what it can.")
    elif not found.records:
        told.append("The store is sound.")
    emit("\n".join(told))
    return 1 if found.damage or found.records else 0


@store.command
def backup(
    file: Annotated[Path, Parameter(help="File to write; an existing store is never replaced")],
    /,
    *,
    force: Annotated[bool, Parameter(help="Replace a file that is not a store", show_default=False)] = False,
    options: StoreOptions = StoreOptions(),
) -> None:
    """Copy the store to a file while other commands read and write it.

    The copy is a store: use it by --store or STEPLAB_STORE, or `mv` it over a
    lost one. `cp` is unsafe: recent records may be only in the -wal file next
    to the store.

    For example: steplab store backup store-2026-11-22.db
    """
    from steplab.cli.output import say
    from steplab.lab.keeping import back_up_store

    back_up_store(file, store=options.store, force=force)
    say(f"wrote {file}")
