"""Texts of reports: what stands for an absent value, why a cell failed, and lines that break in the right places."""

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from steplab.records.failure import Failure
from steplab.records.record import Benchmark, Record
from steplab.units import counted

ABSENT = "–"
"""Shown where a value was not measured."""

_REASON_LENGTH = 90
_UNITS = r"[%×µ°]|[mn]?s\b|[KMGTPE]?i?B\b|[kMGT]?(?:FLOP|B/s|Hz\b|tokens)|[kMGT] tokens|W\b"
"""What follows a figure and stays on its line."""
_FIXED = "\u00a0"
"""A space that does not break."""


def reason(kind: str, message: str, most: int | None = _REASON_LENGTH) -> str:
    """Why a cell failed, short, its kind said once: 'out of memory: asked 8.00 GiB'; whole where `most` is None."""
    words = kind.replace("_", " ")
    text = " ".join(message.split())
    text = text if text.lower().startswith(words) else f"{words}: {text}" if text else words
    return text if most is None or len(text) <= most else text[:most].rpartition(" ")[0] + " …"


def why_failed(failure: Failure, most: int | None = _REASON_LENGTH) -> str:
    """The `reason` of a failure."""
    return reason(failure.kind, failure.message, most)


def interruption(run: Benchmark[Any], noun: str) -> Iterator[str]:
    """A warning that an interrupted benchmark lacks cells; `noun` is what its cells are called."""
    if run.is_interrupted:
        had_ended = f"{len(run.cells)} of {counted(run.num_requested, noun)} had ended"
        yield f"Warning: the benchmark was interrupted: {had_ended}, and the record has only these."


def dotted(*parts: str | None) -> str:
    """The present parts on one line."""
    return " · ".join(part for part in parts if part)


def made(record: Record, noun: str) -> str:
    """The record, its time and its version; `noun` names its kind."""
    return dotted(f"{noun} {record.id}", record.created_utc, f"steplab {record.steplab_version}")


def quoted_name(record: Record) -> str:
    """The name that the user gave, in quotes; empty without one."""
    return f"'{record.name}'" if record.name else ""


def columns(text: str) -> int:
    """Columns of a terminal that a text takes: two for each wide (East Asian) character, none for a combining one."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(letter: str) -> int:
    return 0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def unbroken(text: str) -> str:
    """The text with spaces that do not break between a figure and its unit, and before a separating dot."""
    return re.sub(rf"(?<=\d) (?={_UNITS})|(?<=\d [kMGT]) (?=tokens)| (?=[·=±] )|(?<=[=±]) ", _FIXED, text)


def longest_piece(text: str) -> int:
    """Columns of the longest piece of a text that `flowed` keeps together."""
    return max(map(columns, unbroken(text).split(" ")))


def flowed(text: str, width: int) -> list[str]:
    """A text in lines of at most `width` columns, broken between words and never between a figure and its unit.

    A word longer than a line is cut. Line breaks of the text itself stay. A line has at least one column, however few
    the margins leave of a terminal.
    """
    width = max(1, width)
    lines = [line for paragraph in unbroken(text).split("\n") for line in _flowed(paragraph.split(" "), width)]
    return [line.replace(_FIXED, " ") for line in lines]


def _flowed(pieces: Iterable[str], width: int) -> list[str]:
    lines = [""]
    for piece in pieces:
        if lines[-1] and columns(lines[-1]) + 1 + columns(piece) > width:
            lines.append("")
        *full, last = _cut(piece, width)
        if full:
            lines[-1:] = [*full, ""]
        lines[-1] = f"{lines[-1]} {last}".strip(" ")
    return lines


def _cut(word: str, width: int) -> list[str]:
    """A word in pieces of at most `width` columns, one character at least. Foreign text may be one word of a megabyte,
    so each character is read once.
    """
    if columns(word) <= width:
        return [word]
    begins, taken = [0], 0
    for place, letter in enumerate(word):
        own = _columns_of(letter)
        taken += own
        if taken > width and place > begins[-1]:
            begins.append(place)
            taken = own
    return [word[begin:end] for begin, end in itertools.pairwise([*begins, len(word)])]
