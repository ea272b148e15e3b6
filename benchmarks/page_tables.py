"""Records that tables are made of, and pages that hold them: each table stands between two comments with its name."""

import gzip
import lzma
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from steplab.records.codec import decode
from steplab.records.record import Record
from steplab.report.kit.document import Column, Table
from steplab.report.kit.quantities import LABEL, TEXT

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
GOLDEN = ROOT / "tests/golden"
Kind = TypeVar("Kind", bound=Record)


def read(path: Path, kind: type[Kind]) -> list[Kind]:
    """The records of a kind in a file, the oldest first."""
    unpack = lzma.decompress if path.suffix == ".xz" else gzip.decompress
    found = [record for record in map(decode, unpack(path.read_bytes()).splitlines()) if isinstance(record, kind)]
    return sorted(found, key=lambda record: record.created_utc)


def marks(name: str) -> tuple[str, str]:
    """The comments before and after the tables of this name."""
    return f"<!-- begin: benchmarks/tables.py {name} -->", f"<!-- end: benchmarks/tables.py {name} -->"


def between_marks(page: Path, name: str) -> str:
    """The tables of this name in a page."""
    begin, end = marks(name)
    return page.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip()


def write_between_marks(page: Path, name: str, text: str) -> None:
    """Put the text in place of what stands between the marks of a name; ends the program if the page has none."""
    begin_mark, end_mark = marks(name)
    content = page.read_text(encoding="utf-8")
    begin, end = content.find(begin_mark), content.find(end_mark)
    if not 0 <= begin < end:
        sys.exit(f"{page} has no {begin_mark} with {end_mark} after it")
    page.write_text(f"{content[:begin]}{begin_mark}\n\n{text}\n\n{content[end:]}", encoding="utf-8")


def table_of_texts(
    name: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Sequence[bool],
    caption: str = "",
) -> Table:
    """A table whose cells are texts already, because they are not figures of one quantity to a column."""
    columns = tuple(
        Column(key=str(index), header=header, quantity=LABEL if figures else TEXT)
        for index, (header, figures) in enumerate(zip(headers, numeric, strict=True))
    )
    found = tuple({str(index): text for index, text in enumerate(row)} for row in rows)
    return Table(name=name, columns=columns, rows=found, caption=caption)
