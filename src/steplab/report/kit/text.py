"""Puts absent values and failures into words, and breaks lines in the right places."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from steplab.records.failure import Failure
from steplab.records.record import Benchmark, Record
from steplab.units import counted

ABSENT = "–"

_REASON_LENGTH = 90
_UNITS = r"[%×µ°]|[mn]?s\b|[KMGTPE]?i?B\b|[kMGT]?(?:FLOP|B/s|Hz\b|tokens)|[kMGT] tokens|W\b"
_FIXED = "\u00a0"


def reason(kind: str, message: str, most: int | None = _REASON_LENGTH) -> str:
    """Example: 'out of memory: asked 8.00 GiB', cut to `most` characters; None: uncut."""
    words = kind.replace("_", " ")
    text = " ".join(message.split())
    text = text if text.lower().startswith(words) else f"{words}: {text}" if text else words
    return text if most is None or len(text) <= most else text[:most].rpartition(" ")[0] + " …"


def why_failed(failure: Failure, most: int | None = _REASON_LENGTH) -> str:
    return reason(failure.kind, failure.message, most)


def interruption(run: Benchmark[Any], noun: str) -> Iterator[str]:
    if run.is_interrupted:
        had_ended = f"{len(run.cells)} of {counted(run.num_requested, noun)} had ended"
        yield f"Warning: the benchmark was interrupted: {had_ended}, and the record has only these."


def dotted(*parts: str | None) -> str:
    return " · ".join(part for part in parts if part)


def made(record: Record, noun: str) -> str:
    return dotted(f"{noun} {record.id}", record.created_utc, f"steplab {record.steplab_version}")


def quoted_name(record: Record) -> str:
    return f"named '{record.name}'" if record.name else ""


def columns(text: str) -> int:
    from rich.cells import cell_len

    return len(text) if text.isascii() else cell_len(text)


def unbroken(text: str) -> str:
    """Insert no-break spaces between figures and units, and before separating dots."""
    return re.sub(rf"(?<=\d) (?={_UNITS})|(?<=\d [kMGT]) (?=tokens)| (?=[·=±] )|(?<=[=±]) ", _FIXED, text)


def longest_piece(text: str) -> int:
    """Width of the longest piece that `flowed` does not break."""
    return max(map(columns, unbroken(text).split(" ")))


def flowed(text: str, width: int) -> list[str]:
    """Break a text into lines of at most `width` columns, between words but not between a figure and its unit.

    Longer words are cut. The text's own line breaks stay.
    """
    width = max(1, width)
    lines = [line for paragraph in unbroken(text).split("\n") for line in _flowed(paragraph.split(" "), width)]
    return [line.replace(_FIXED, " ") for line in lines]


def _cut(word: str, width: int) -> list[str]:
    """Parts of at most `width` columns, after a mark inside the word if one is in the last quarter of the part."""
    from rich.cells import chop_cells

    at = rf".{{{3 * width // 4},{width - 1}}}[_.,(=<:/]|.{{1,{width}}}"
    parts = re.findall(at, word) if columns(word) == len(word) else [word]
    return [piece for part in parts for piece in chop_cells(part, width) if piece]


def _flowed(pieces: Iterable[str], width: int) -> list[str]:
    lines = [""]
    for piece in pieces:
        if lines[-1] and columns(lines[-1]) + 1 + columns(piece) > width:
            lines.append("")
        *full, last = _cut(piece, width) if columns(piece) > width else [piece]
        if full:
            lines[-1:] = [*full, ""]
        lines[-1] = f"{lines[-1]} {last}".strip(" ")
    return lines
