"""Pieces of hand-written SVG for the pictures of memory: colours of categories, texts with a halo, bars, hatching."""

import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from steplab.report.kit.charts import CATEGORY_COLORS, INK, PAPER, SERIES, css_color
from steplab.report.kit.labels import text_width
from steplab.report.memory_figures import in_order
from steplab.report.memory_words import category_word

LETTERS = 11
"""Size of the letters, in pixels."""
_HATCH_PX = 5.0
_PLACES = {
    "parameters": 0,
    "gradients": 3,
    "optimizer_state": 5,
    "activations": 2,
    "autocast_copies": 1,
    "inputs": 6,
    "workspaces": 7,
    "temporaries": 4,
    "rounding": 10,
    "before": 0,
    "during": 2,
}
"""Which of the categories' colours each has, so that neighbours in a stack differ in lightness as well."""


def color_of(category: str) -> str:
    """The stand-in of a category's colour, the same in every picture."""
    return CATEGORY_COLORS[_PLACES.get(category, 11)]


def legend_of(categories: Iterable[str]) -> tuple[tuple[int, str, str], ...]:
    """Legend of these categories, in their order."""
    return tuple(
        (len(SERIES) + 1 + CATEGORY_COLORS.index(color_of(name)), "■", category_word(name))
        for name in in_order(categories)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A rectangle that something takes up."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        """Whether the two overlap."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def text_box(x: float, y: float, text: str, anchor: str) -> Box:
    """What a text with its baseline at y takes up."""
    width = text_width(text, LETTERS)
    left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
    return Box(left=left, top=y - LETTERS, right=left + width, bottom=y + 3)


def text_at(x: float, y: float, text: str, color: str = INK, anchor: str = "start") -> str:
    """A line of text; in the colour of text it has a halo, by the page's style sheet."""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{LETTERS}" text-anchor="{anchor}"'
    return f'<text {place} style="fill: {css_color(color)}">{html.escape(text)}</text>'


def titled(tip: str, body: str) -> str:
    """A piece with a hover text."""
    return f"<g><title>{html.escape(tip)}</title>{body}</g>"


def bar(left: float, top: float, width: float, height: float, color: str, *, hatched: bool = False) -> str:
    """A filled rectangle; hatched, it is an outline around strokes over a faint fill: something not measured."""
    box = f'd="M{left:.2f} {top:g}h{width:.2f}v{height:g}h{-width:.2f}z"'
    if not hatched:
        return f'<path {box} fill="{css_color(color)}"/>'
    strokes = "".join(_hatching(left, top, width, height))
    return (
        f'<path {box} fill="{css_color(color)}" fill-opacity="0.18" stroke="{css_color(color)}"/>'
        f'<path d="{strokes}" fill="none" stroke="{css_color(color)}" stroke-width="1.4" pointer-events="none"/>'
    )


def _hatching(left: float, top: float, width: float, height: float) -> Iterator[str]:
    """Strokes that rise to the right, at the same places whatever the rectangle, cut at its edges."""
    right, bottom = left + width, top + height
    first = int((left + top) // _HATCH_PX) + 1
    last = int((right + bottom) // _HATCH_PX)
    for number in range(first, last + 1):
        crossing = number * _HATCH_PX  # x + y along the stroke
        x0, x1 = max(left, crossing - bottom), min(right, crossing - top)
        if x1 > x0:
            yield f"M{x0:.1f} {crossing - x0:.1f}L{x1:.1f} {crossing - x1:.1f}"


def dot(x: float, y: float, color: str, radius: float = 4) -> str:
    """A mark with a rim in the colour of the page."""
    fill, rim = css_color(color), css_color(PAPER)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}" stroke="{rim}" stroke-width="1.5"/>'


def picture(title: str, width: float, height: float, body: str) -> str:
    """The element, responsive and labelled."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="100%" role="img" '
        f'aria-label="{html.escape(title)}">{body}</svg>'
    )
