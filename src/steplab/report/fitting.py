"""What a table of figures needs of a terminal's width, and which columns it does without where there is less."""

import re

from steplab.report.grid import Grid

_LONGEST_WORD = 14  # a longer one may be broken
_FIGURE = re.compile(r"(?:[≈+-] ?)?\d[\d.,]*(?: \S+)?|\S+")
"""A figure with its unit, else a word."""
_BETWEEN = 2  # columns; rich counts half of it at the right of the last one too


def least_widths(grid: Grid) -> list[int]:
    """Columns of the terminal that each column of the table needs, so that no word and no figure is cut or broken; a
    word too long for any table is broken."""
    return [
        max(_least(text, figures=grid.numeric[index]) for text in (header, *(row[index] for row in grid.rows)))
        for index, header in enumerate(grid.headers)
    ]


def fit(grid: Grid, width: int, *droppable: str) -> Grid:
    """The table without as many of the droppable columns, in this order, as is needed to fit in the width; its caption
    says which."""
    shown, dropped = grid, list[str]()
    for header in droppable:
        if sum(least_widths(shown)) <= _room(shown, width):
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
    lines = [""]
    for piece in _FIGURE.findall(text):
        if lines[-1] and len(lines[-1]) + 1 + len(piece) > width:
            lines.append(piece)
        else:
            lines[-1] = f"{lines[-1]} {piece}".strip()
    return "\n".join(lines)


def _room(grid: Grid, width: int) -> int:
    """Columns of the terminal that are left for texts."""
    return width - _BETWEEN * len(grid.headers) + 1


def _least(text: str, *, figures: bool) -> int:
    pieces = _FIGURE.findall(text) if figures else text.split()
    return min(max(map(len, pieces), default=0), _LONGEST_WORD)
