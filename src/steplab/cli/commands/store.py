"""Check, repair, compact and back up the store, the file that holds all records.

For example: steplab store check
"""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from steplab.cli.options import OutputOptions, StoreOptions

store = App(name="store", help_format="plaintext")


@store.command
def check(*, out: OutputOptions = OutputOptions()) -> int:
    """Read everything in the store and say what is damaged; nothing is changed.

    SQLite checks the structure of the file, and then each record is read. The
    exit code is 1 if anything is damaged.

    For example: steplab store check
    """
    from steplab.cli.output import chosen_format, emit_document
    from steplab.cli.progress import ProgressLine
    from steplab.lab.store_care import check_store
    from steplab.measurement.progress import Progress
    from steplab.report.store import condition_document

    chosen = chosen_format(out.format, out)
    with ProgressLine() as line:
        line.within(Progress(stage="check", done=0, total=0))
        condition = check_store(out.store)
    emit_document(condition_document(condition), chosen, out)
    return 0 if condition.is_sound else 1


@store.command
def repair(*, options: StoreOptions = StoreOptions()) -> None:
    """Build a damaged store anew of every record that can be read.

    The store as it was is first copied to a file beside it. Records that
    cannot be read are moved to another file beside it, one line of JSON each,
    so that they no longer warn. The rows that lists show are made again. A
    store without damage is left unchanged.

    End other steplab commands first: if one writes meanwhile, nothing is changed.

    For example: steplab store repair
    """
    from steplab.cli.output import say
    from steplab.cli.progress import ProgressLine
    from steplab.lab.store_care import repair_store
    from steplab.measurement.progress import Progress
    from steplab.units import counted

    with ProgressLine() as line:
        line.within(Progress(stage="check", done=0, total=0))
        repaired = repair_store(options.store)
    if repaired is None:
        say("the store is sound, and was left unchanged")
        return
    say(f"the store as it was is in {repaired.before}")
    if repaired.unreadable:
        verb = "was" if repaired.num_moved == 1 else "were"
        say(f"{counted(repaired.num_moved, 'unreadable record')} {verb} moved to {repaired.unreadable}")
    if repaired.has_unreachable:
        say("parts of the file could not be read, and the records there are lost")
    say(f"the rows of {counted(repaired.num_renewed, 'record')} in lists were made again")
    say("the store is repaired; `steplab store check` checks it")


@store.command
def compact(*, options: StoreOptions = StoreOptions()) -> None:
    """Give back to the disk the space that removed records left in the store.

    The file is written anew, for which the disk needs as much free space as
    the store takes.

    For example: steplab store compact
    """
    from steplab.cli.output import say
    from steplab.lab.store_care import compact_store
    from steplab.units import format_bytes

    before_bytes, after_bytes = compact_store(options.store)
    say(f"{format_bytes(before_bytes)} before, {format_bytes(after_bytes)} now")


@store.command
def backup(
    file: Annotated[Path, Parameter(help="File to write; an existing store is never replaced")],
    /,
    *,
    force: Annotated[
        bool, Parameter(help="Replace a file that is not a store", negative="", show_default=False)
    ] = False,
    options: StoreOptions = StoreOptions(),
) -> None:
    """Copy the store to a file while other commands may read and write it.

    The copy is a store itself: --store or STEPLAB_STORE names it, and `mv`
    puts it in the place of a lost one. Do not copy a store by `cp`: what was
    written last may still be in the file beside it that ends in -wal.

    For example: steplab store backup store-2026-11-22.db
    """
    from steplab.cli.output import say
    from steplab.lab.store_care import back_up_store

    back_up_store(file, store=options.store, force=force)
    say(f"wrote {file}")
