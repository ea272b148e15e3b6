"""What a table of figures needs of a terminal's width, and which columns it does without where there is less."""

import re
from collections.abc import Iterable

from steplab.report.grid import Grid

_LONGEST_WORD = 14  # a longer one may be broken
_FIGURE = re.compile(r"(?:[≈<+-] ?)?\d[\d.,]*(?:e[+-]?\d+)?(?:×(?!\d))?(?: \S+)?|\S+")
"""A figure with its unit or as a factor, else a word."""
_WITH_UNIT = re.compile(r"\S*\d (?:(?:[KMGTPE]i)?B|%|ns|µs|ms|s)(?!\w)\S*|\S+")
"""A figure of a sentence with its unit and the signs around it, else a word."""
_BETWEEN = 2  # columns; rich counts half of it at the right of the last one too


def least_widths(grid: Grid) -> list[int]:
    """Columns of the terminal that each column of the table needs, so that no word and no figure is cut or broken; a
    word too long for any table is broken, a figure and a text of a column that stays whole never."""
    return [
        max(_least(header, figures=False), *(_least_of(grid, index, row[index]) for row in grid.rows), 0)
        for index, header in enumerate(grid.headers)
    ]


def fits(grid: Grid, width: int) -> bool:
    """Whether the table has room for what it may not break."""
    return sum(least_widths(grid)) <= _room(grid, width)


def first_fitting(grids: Iterable[Grid], width: int) -> Grid:
    """The first of these tables that fits, the widest being first; else the last. There is one at least."""
    chosen = None
    for chosen in grids:
        if fits(chosen, width):
            break
    assert chosen is not None  # the caller's: there is one
    return chosen


def fit(grid: Grid, width: int, *droppable: str) -> Grid:
    """The table without as many of the droppable columns, in this order, as is needed to fit in the width; its caption
    says which."""
    shown, dropped = grid, list[str]()
    for header in droppable:
        if fits(shown, width):
            break
        if header in shown.headers:
            dropped.append(header)
            shown = grid.without(*dropped)
    return shown.remarking(f"Left out for want of width: {', '.join(dropped)}.") if dropped else shown


def widths(grid: Grid, width: int) -> list[int]:
    """Width of each column of a table so wide: the least it needs, and what is left over first to those that lack
    least, so that most are whole and the longest texts are what is broken."""
    given = least_widths(grid)
    columns = zip(grid.headers, *grid.rows, strict=True)
    natural = [max(map(len, texts)) for texts in columns]
    left = max(_room(grid, width) - sum(given), 0)
    for index in sorted(range(len(given)), key=lambda i: natural[i] - given[i]):
        more = min(max(natural[index] - given[index], 0), left)
        given[index] += more
        left -= more
    return given


def broken(text: str, width: int) -> str:
    """A cell of figures in lines of at most this width, each figure with its unit on one."""
    return _flowed(_FIGURE.findall(text), width)


def flowed(sentence: str, width: int) -> str:
    """A sentence in lines of at most this width that begin between words, and never between a figure and its unit."""
    return _flowed(_WITH_UNIT.findall(sentence), width)


def _flowed(pieces: Iterable[str], width: int) -> str:
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + 1 + len(piece) > width:
            lines.append(piece)
        else:
            lines[-1] = f"{lines[-1]} {piece}".strip()
    return "\n".join(lines)


def _room(grid: Grid, width: int) -> int:
    """Columns of the terminal that are left for texts."""
    return width - _BETWEEN * len(grid.headers) + 1


def _least_of(grid: Grid, index: int, text: str) -> int:
    return len(text) if grid.headers[index] in grid.whole else _least(text, figures=grid.numeric[index])


def _least(text: str, *, figures: bool) -> int:
    pieces = _FIGURE.findall(text) if figures else text.split()
    kept = figures and any(map(str.isdigit, text))
    return max((len(piece) if kept else min(len(piece), _LONGEST_WORD) for piece in pieces), default=0)
