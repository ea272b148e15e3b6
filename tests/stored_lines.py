"""Lines of JSON in a store, as `steplab import` puts them there."""

from collections.abc import Iterable

from steplab.store.database import Store
from steplab.store.record_table import read_foreign


def import_lines(store: Store, lines: Iterable[bytes]) -> tuple[int, int]:
    """Store the record in each line, all or none; gives how many were added and how many were there already."""
    numbered = enumerate(lines, start=1)
    return store.import_records([read_foreign(f"line {number}", line) for number, line in numbered if line.strip()])
