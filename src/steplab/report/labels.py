"""Texts in a picture made to fit: measured, broken into lines, and only then shortened.

An SVG neither wraps text nor moves it into view, so a label that is wider than its place would be cut by the picture's
edge or run into its neighbour. Widths are those of DejaVu Sans, wider than what browsers usually have.
"""

import re
import unicodedata
from collections.abc import Sequence

LINE = 1.25
"""Height of a line of text, as a multiple of its size."""

_SHORTEST = 6  # characters that a shortened label keeps, however narrow its place


def text_width(text: str, size_px: float) -> float:
    """Pixels that a line of text takes at most."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    # The font that is measured has no glyphs as wide as those of East Asian scripts; its 'W' is about as wide.
    latin = "".join("W" if unicodedata.east_asian_width(letter) in "WF" else letter for letter in text)
    font = FontProperties(family="DejaVu Sans", size=size_px)
    return float(text_to_path.get_text_width_height_descent(latin, font, ismath=False)[0])


def wrap(text: str, width_px: float, size_px: float, most_lines: int) -> list[str]:
    """The text in lines of that width, shortened in the middle where it needs more of them than `most_lines`.

    Breaks after ' · ' where that will do, then between words, then within a name after its punctuation, then anywhere.
    """
    lines = _broken(text, width_px, size_px)
    kept = len(text)
    while len(lines) > most_lines and kept > _SHORTEST:
        kept = max(_SHORTEST, min(kept - 1, int(kept * (most_lines + 0.5) / len(lines))))
        lines = _broken(shortened(text, kept), width_px, size_px)
    return lines


def shortened(text: str, most: int) -> str:
    """A text of that many characters, without its middle: names that share a beginning mostly differ at their end."""
    head = most // 3
    return text if len(text) <= most else f"{text[:head]}…{text[head + 1 - most :]}"


def fitted(text: str, width_px: float, size_px: float) -> str:
    """The text on one line of that width, shortened if need be."""
    return wrap(text, width_px, size_px, 1)[0] if text_width(text, size_px) > width_px else text


def _broken(text: str, width_px: float, size_px: float) -> list[str]:
    lines = [""]
    for part in _parts(text, width_px, size_px, (r"(?<= · )", r"(?<= )", r"(?<=[._:/\-])", r"(?<=.)")):
        if lines[-1] and text_width((lines[-1] + part).rstrip(" ·"), size_px) > width_px:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def _parts(text: str, width_px: float, size_px: float, breaks: Sequence[str]) -> list[str]:
    """The text cut at the first kind of break; what is still too wide, at the next."""
    if not breaks or text_width(text.rstrip(" ·"), size_px) <= width_px:
        return [text]
    cut = [part for part in re.split(breaks[0], text) if part]
    return [piece for part in cut for piece in _parts(part, width_px, size_px, breaks[1:])]
