from collections.abc import Iterable
from pathlib import Path

from steplab.records.record import Record
from steplab.store.database import Store
from steplab.store.record_table import read_foreign


def import_lines(store: Store, lines: Iterable[bytes]) -> tuple[int, int]:
    numbered = enumerate(lines, start=1)
    return store.import_records([read_foreign(f"line {number}", line) for number, line in numbered if line.strip()])


def fill(path: Path | str, *records: Record) -> None:
    with Store.open(path, write=True) as store:
        for record in records:
            store.add(record)
