"""Tables in a page that is written by hand: each stands between two comments that name the script that makes it."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from steplab.report.kit.document import Column, Table
from steplab.report.kit.quantities import LABEL, TEXT


def marks(script: str) -> tuple[str, str]:
    """The comments before and after what a script of benchmarks/ makes."""
    return f"<!-- begin: benchmarks/{script} -->", f"<!-- end: benchmarks/{script} -->"


def write_between_marks(page: Path, script: str, text: str) -> None:
    """Put the text in place of what stands between the marks of a script; ends the program if the page has none."""
    begin_mark, end_mark = marks(script)
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
