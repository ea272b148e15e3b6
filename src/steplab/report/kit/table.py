"""Fits tables to a terminal's width, and writes them as CSV."""

import csv
import io
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from steplab.printing import plain
from steplab.records.rows import Scalar
from steplab.report.kit.document import RESULT, Column, Row, Table
from steplab.report.kit.text import ABSENT, columns, flowed, longest_piece, reason

_T = TypeVar("_T")

_GAP = "  "
_FOOTNOTE_FROM = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    """Cell texts; a repeated long text is replaced by its footnote's number."""
    said: tuple[tuple[str, ...], ...]
    """Words for cells that move below their row; empty for columns that stay and for usual values."""
    caption: str
    """Values common to all rows, then the table's caption."""
    notes: tuple[tuple[str, ...], ...]
    """By column: its definition, and the texts that its footnotes' numbers stand for."""
    failures: frozenset[int]
    bars: Mapping[int, tuple[float, ...]]
    """Bar lengths from 0 to 1, one per row, by column index."""

    @property
    def below(self) -> str:
        return self.below_without(())

    def below_without(self, left_out: Collection[Column]) -> str:
        """The small print, without the notes of columns that are not shown."""
        own = zip(self.columns, self.notes, strict=True)
        notes = dict.fromkeys(note for column, notes in own if column not in left_out for note in notes)
        return " ".join(filter(None, (self.caption, *notes)))


def sheet(table: Table) -> Sheet:
    kept: list[Column] = []
    shared: list[str] = []
    failures = frozenset(index for index, row in enumerate(table.rows) if row.get("status", "ok") != "ok")
    for column in table.columns:
        texts = [_text(column, row) for row in table.rows]
        if all(text in (ABSENT, column.quiet) for text in texts) or (column.key == RESULT.key and not failures):
            continue
        if column.shared and len(table.rows) > 1 and (value := _common(column, table.rows)) is not None:
            shared.append(column.said(value))
        else:
            kept.append(column)
    said = " · ".join(filter(None, shared))
    notes = [[column.note] if column.note else [] for column in kept]
    parts = [f"{said}." if said and (table.caption or any(notes)) else said, table.caption]
    cells = [[_text(column, row) for row in table.rows] for column in kept]
    for column, texts, own in zip(kept, cells, notes, strict=True):
        long = [text for text, count in Counter(texts).items() if len(text) >= _FOOTNOTE_FROM and count > 1]
        if long and column.shared and not column.quantity.numeric:
            texts[:] = [f"note {long.index(text) + 1}" if text in long else text for text in texts]
            own += [f"{column.heading}, note {number}: {text}." for number, text in enumerate(long, start=1)]
    return Sheet(
        columns=tuple(kept),
        rows=tuple(zip(*cells, strict=True)) if kept else ((),) * len(table.rows),
        said=tuple(tuple(_said(column, row) for column in kept) for row in table.rows),
        caption=" ".join(plain(part) for part in parts if part),
        notes=tuple(tuple(map(plain, own)) for own in notes),
        failures=failures,
        bars={index: _lengths(column, table.rows) for index, column in enumerate(kept) if column.bar},
    )


def _lengths(column: Column, rows: Sequence[Row]) -> tuple[float, ...]:
    values = [row.get(column.key) for row in rows]
    known = [float(value) if isinstance(value, int | float) else 0.0 for value in values]
    most = max(known, default=0.0) or 1.0
    return tuple(value / most for value in known)


def _text(column: Column, row: Row) -> str:
    if column.key != RESULT.key:
        return plain(column.quantity.show(row.get(column.key)))
    status = row.get("status")
    if status is None:  # a row about several results has no single one
        return ABSENT
    return "ok" if status == "ok" else plain(reason(str(status), str(row.get(RESULT.key) or "")))


def _common(column: Column, rows: Sequence[Row]) -> Scalar:
    """The value if all rows show the same; failed rows may lack it."""
    silent_failures = all(row.get("status", "ok") != "ok" for row in rows if row.get(column.key) is None)
    known = {_text(column, row): row[column.key] for row in reversed(rows) if row.get(column.key) is not None}
    return next(iter(known.values())) if len(known) == 1 and silent_failures else None


def _said(column: Column, row: Row) -> str:
    text = _text(column, row)
    if not column.folds or text in (ABSENT, column.quiet):
        return ""
    return plain(column.said(row[column.key])) or text


def _folded(shown: Sheet) -> tuple[Sheet, tuple[str, ...]]:
    staying = [index for index, column in enumerate(shown.columns) if not column.folds]

    def kept(all_: Sequence[_T]) -> tuple[_T, ...]:
        return tuple(all_[index] for index in staying)

    words = tuple(" · ".join(filter(None, said)) for said in shown.said)
    return replace(
        shown, columns=kept(shown.columns), rows=tuple(map(kept, shown.rows)), said=tuple(map(kept, shown.said))
    ), words


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: tuple[Column, ...]
    left_out_names: tuple[str, ...]


def drawn(shown: Sheet, width: int) -> Drawn:
    """Lay out the table in at most `width` characters, with the columns that fit; if none do, one field per line.

    If a folding column does not fit, all folding columns move below their rows, unless there is only one.
    """
    chosen = _fitting(shown, width)
    below = ("",) * len(shown.rows)
    if sum(column.folds for column in shown.columns) > 1 and any(
        column.folds and index not in chosen for index, column in enumerate(shown.columns)
    ):
        shown, below = _folded(shown)
        chosen = _fitting(shown, width)
    if not chosen:
        label = max((columns(column.heading) for column in shown.columns), default=0)
        return Drawn(
            header=(),
            rows=tuple(
                (*_stacked(shown, row, label, width), *_indented(words, width))
                for row, words in zip(shown.rows, below, strict=True)
            ),
            left_out=(),
            left_out_names=(),
        )
    widths = _widths(shown, chosen, width)

    def lines(cells: Sequence[str]) -> tuple[str, ...]:
        broken = [flowed(cells[index], size) for index, size in zip(chosen, widths, strict=True)]
        height = max(map(len, broken))
        placed = []
        for index, size, own in zip(chosen, widths, broken, strict=True):
            right = shown.columns[index].quantity.numeric
            padded = [*own, *[""] * (height - len(own))]
            placed.append([" " * (size - columns(t)) + t if right else t + " " * (size - columns(t)) for t in padded])
        return tuple(_GAP.join(pieces).rstrip() for pieces in zip(*placed, strict=True))

    rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    return Drawn(
        header=(*lines([column.heading for column in shown.columns]), rule),
        rows=tuple((*lines(row), *_indented(words, width)) for row, words in zip(shown.rows, below, strict=True)),
        left_out=tuple(column for index, column in enumerate(shown.columns) if index not in chosen),
        left_out_names=tuple(dict.fromkeys(_names_without(shown.columns, chosen))),
    )


def _names_without(columns: Sequence[Column], chosen: Sequence[int]) -> Iterator[str]:
    """Headings of the columns that are not shown, after their left neighbour's if a shown column has the same one."""
    seen = {columns[index].heading for index in chosen}
    for index, column in enumerate(columns):
        if index not in chosen:
            before = f"{columns[index - 1].heading} " if index and column.heading in seen else ""
            yield f"{before}{column.heading}"


def _indented(words: str, width: int) -> list[str]:
    return [_GAP + line for line in flowed(words, width - len(_GAP))] if words else []


def _fitting(shown: Sheet, width: int) -> list[int]:
    chosen = list(range(len(shown.columns)))
    while sum(_least(shown, index) for index in chosen) + len(_GAP) * (len(chosen) - 1) > width:
        last = shown.columns[max(chosen, key=lambda index: (shown.columns[index].rank, index))]
        if last.rank == 0:
            return []
        alike = (last.rank, last.heading)
        chosen = [index for index in chosen if (shown.columns[index].rank, shown.columns[index].heading) != alike]
    return chosen


def _least(shown: Sheet, index: int) -> int:
    """Minimum width that cuts no number, and no text unless the column wraps; texts in numeric columns may break
    between words.
    """
    column = shown.columns[index]
    measured = longest_piece if column.quantity.numeric else columns
    widest = max((measured(row[index]) for row in shown.rows), default=0)
    if column.wraps_from is not None:
        widest = min(widest, column.wraps_from)
    return max(widest, longest_piece(column.heading))


def _widths(shown: Sheet, chosen: Sequence[int], width: int) -> list[int]:
    given = [_least(shown, index) for index in chosen]
    whole = [
        max(columns(text) for text in (shown.columns[index].heading, *(row[index] for row in shown.rows)))
        for index in chosen
    ]
    left = width - sum(given) - len(_GAP) * (len(chosen) - 1)
    for place in sorted(range(len(chosen)), key=lambda place: whole[place] - given[place]):
        more = min(whole[place] - given[place], left)
        given[place] += more
        left -= more
    return given


def _stacked(shown: Sheet, row: Sequence[str], label: int, width: int) -> Iterator[str]:
    for column, text in zip(shown.columns, row, strict=True):
        first, *rest = flowed(text, max(width - label - len(_GAP), 8))
        yield f"{column.heading:<{label}}{_GAP}{first}".rstrip()
        yield from (" " * (label + len(_GAP)) + line for line in rest)
    yield ""


def csv_rows(rows: Sequence[Row]) -> str:
    """CSV with a header, without a final newline.

    An apostrophe precedes texts and column names that begin with one, or that a spreadsheet would run as formulas;
    readers remove it. Numbers are unchanged.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    target = io.StringIO()
    writer = csv.DictWriter(target, keys, lineterminator="\n")
    writer.writerow({key: _inert(key) for key in keys})
    for row in rows:
        writer.writerow({key: _inert(value) if isinstance(value, str) else value for key, value in row.items()})
    return target.getvalue().removesuffix("\n")


def _inert(text: str) -> str:
    """Protects from CSV injection (OWASP)."""
    text = plain(text)
    return f"'{text}" if text.startswith(_STARTS_A_FORMULA) else text


_STARTS_A_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠", "'")
"""First characters of a formula, their wide East Asian forms, and the apostrophe itself."""
