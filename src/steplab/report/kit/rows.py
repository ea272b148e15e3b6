"""Rows for programs, as CSV."""

import csv
import io
from collections.abc import Sequence

from steplab.printing import plain
from steplab.report.kit.document import Row


def csv_rows(rows: Sequence[Row]) -> str:
    """A header and one line per row, without a newline at the end.

    Texts that a spreadsheet would run as formulas, or that begin with an apostrophe, get an apostrophe in front;
    readers restore them by removing one. That holds for names of columns, too, which are another's in a store from
    elsewhere. Numbers stay as they are.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    target = io.StringIO()
    writer = csv.DictWriter(target, keys, lineterminator="\n")
    writer.writerow({key: _inert(key) for key in keys})
    for row in rows:
        writer.writerow({key: _inert(value) if isinstance(value, str) else value for key, value in row.items()})
    return target.getvalue().removesuffix("\n")


def _inert(text: str) -> str:
    """A cell of CSV that spreadsheets show as it is (OWASP, "CSV Injection"); it is looked at as it will leave."""
    text = plain(text)
    return f"'{text}" if text.startswith(_STARTS_A_FORMULA) else text


_STARTS_A_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠", "'")
"""What makes a formula of a cell, the wide forms in spreadsheets for East Asian languages; and the mark itself."""
