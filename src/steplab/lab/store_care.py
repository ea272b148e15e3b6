"""Examine, repair, compact and back up a store."""

from pathlib import Path

from steplab.lab.files import Destination, folder_for
from steplab.records.store_condition import StoreCondition
from steplab.store import care
from steplab.store.care import Repair
from steplab.store.location import default_path


def check_store(store: Path | str | None = None) -> StoreCondition:
    """The condition of a store, of which everything is read. Raises SteplabError if it cannot be opened."""
    return care.check(_path(store))


def repair_store(store: Path | str | None = None) -> Repair | None:
    """Build a damaged store anew of what can be read; None if there is nothing to repair.

    Raises SteplabError if the store cannot be opened, or if another process writes to it meanwhile.
    """
    path = _path(store)
    condition = care.check(path)
    return None if condition.is_sound and not condition.num_outdated else care.repair(path)


def compact_store(store: Path | str | None = None) -> tuple[int, int]:
    """Give back the space that removed records left; returns the size before and after in bytes."""
    return care.compact(_path(store))


def back_up_store(target: Path, *, store: Path | str | None = None, force: bool = False) -> None:
    """Copy a store, which others may use meanwhile, to a file. Raises as Destination does for one that is not replaced.

    The copy is a store: --store names it.
    """
    destination = Destination(path=target, kind="backup", store=store, force=force)
    with folder_for(destination) as folder:
        copy = folder / "store.db"
        care.copy(_path(store), copy)
        destination.take(copy)


def _path(store: Path | str | None) -> Path:
    return Path(store) if store else default_path()
