"""A document for programs: its rows with raw values in base units, as JSON or CSV."""

import csv
import io
import json
from collections.abc import Sequence

from steplab.report.kit.document import Document, Row


def to_json(document: Document) -> str:
    """The rows of the document's table; of several tables an object that has the rows of each under its name."""
    found = document.data
    rows: object = {table.name: table.rows for table in found} if isinstance(found, tuple) else found.rows
    return json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False)


def to_csv(document: Document) -> str:
    """The rows of the document's table, of several the first; an absent value is an empty field."""
    found = document.data
    if isinstance(found, tuple):
        return csv_rows(found[0].rows) if found else ""
    return csv_rows(found.rows)


def csv_rows(rows: Sequence[Row]) -> str:
    """A header and one line per row, without a newline at the end."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    target = io.StringIO()
    writer = csv.DictWriter(target, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue().removesuffix("\n")
