"""Draws docs/attention_tiles.svg: which tiles of the scores each pass of FlashAttention-2 visits, and in which order.

python docs/attention_tiles.py
"""

from collections.abc import Iterator
from pathlib import Path

ROWS, COLUMNS, SIDE = 5, 6, 44
LEFT, TOP, GAP = 70, 76, 150
WHOLE, MASKED, HIDDEN, NOW, INK = "#9ec5e8", "#dbe8f4", "#f4f4f4", "#e8963c", "#333333"


def main() -> None:
    width = 2 * LEFT + 2 * COLUMNS * SIDE + GAP
    height = TOP + ROWS * SIDE + 120
    body = "\n".join((*_forward(LEFT), *_backward(LEFT + COLUMNS * SIDE + GAP), *_legend(height - 34)))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}" role="img" '
        'aria-label="Tiles of the scores under a causal mask, forward by rows and backward by columns">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{NOW}"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )
    Path(__file__).with_name("attention_tiles.svg").write_text(svg, encoding="utf-8")


def _forward(x: int) -> Iterator[str]:
    row = 3
    yield _text(x, 24, "Forward: a program holds one tile of queries", bold=True)
    yield _text(x, 42, "and goes over the keys that it sees")
    yield from _tiles(x)
    y = TOP + row * SIDE
    yield _outline(x, y, SIDE * (row + 1), SIDE)
    yield _arrow(x + 10, y + SIDE / 2, x + (row + 1) * SIDE - 8, y + SIDE / 2)
    yield _text(x - 8, y + SIDE / 2 + 5, "Q tile", anchor="end")
    yield _text(
        x + COLUMNS * SIDE / 2, TOP + ROWS * SIDE + 20, "kept on the chip: the row's highest score m,", anchor="middle"
    )
    yield _text(
        x + COLUMNS * SIDE / 2, TOP + ROWS * SIDE + 38, "its sum of weights l, its output so far O", anchor="middle"
    )


def _backward(x: int) -> Iterator[str]:
    column = 1
    yield _text(x, 24, "Backward: a program holds one tile of keys", bold=True)
    yield _text(x, 42, "and goes over the queries that see it")
    yield from _tiles(x)
    left = x + column * SIDE
    top = TOP + column * SIDE
    yield _outline(left, top, SIDE, SIDE * (ROWS - column))
    yield _arrow(left + SIDE / 2, top + 10, left + SIDE / 2, TOP + ROWS * SIDE - 8)
    yield _text(left + SIDE / 2, TOP - 8, "K, V tile", anchor="middle")
    middle = x + COLUMNS * SIDE / 2
    yield _text(middle, TOP + ROWS * SIDE + 20, "kept on the chip: dK and dV of the tile;", anchor="middle")
    yield _text(middle, TOP + ROWS * SIDE + 38, "dQ is summed by rows, as in the forward pass", anchor="middle")


def _tiles(x: int) -> Iterator[str]:
    for row in range(ROWS):
        for column in range(COLUMNS):
            left, top = x + column * SIDE, TOP + row * SIDE
            fill = WHOLE if column < row else MASKED if column == row else HIDDEN
            yield f'<rect x="{left}" y="{top}" width="{SIDE}" height="{SIDE}" fill="{fill}" stroke="white"/>'
            if column == row:
                corners = f"{left},{top} {left},{top + SIDE} {left + SIDE},{top + SIDE}"
                yield f'<polygon points="{corners}" fill="{WHOLE}"/>'
    yield _text(x - 8, TOP + 12, "queries", anchor="end")
    yield _text(x + COLUMNS * SIDE, TOP - 8, "keys", anchor="end")


def _legend(y: int) -> Iterator[str]:
    x = LEFT
    for fill, words in (
        (WHOLE, "pairs that count"),
        (MASKED, "computed with their tile, and masked"),
        (HIDDEN, "tiles never visited"),
        (NOW, "the work of one program"),
    ):
        yield f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{fill}" stroke="#bbbbbb"/>'
        yield _text(x + 20, y, words)
        x += 36 + round(6.4 * len(words))


def _text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{words}</text>'


def _outline(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="none" stroke="{NOW}" stroke-width="3"/>'
    )


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {ends} stroke="{NOW}" stroke-width="2" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    main()
