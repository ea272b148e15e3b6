"""Fits labels into pictures: measures, breaks and shortens them.

An SVG does not wrap text. Widths are DejaVu Sans's, wider than browsers' usual fonts.
"""

import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import takewhile

from steplab.printing import plain

_MEASURED_PX = 100.0
_LONGEST_NAME = 32


def text_width(text: str, size_px: float) -> float:
    """Upper bound, in pixels."""
    return sum(map(_letter_width, text)) * size_px / _MEASURED_PX


@functools.cache
def _letter_width(letter: str) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    # The measured font lacks East Asian glyphs; its 'W' is about as wide.
    latin = "W" if unicodedata.east_asian_width(letter) in "WF" else letter
    font = FontProperties(family="DejaVu Sans", size=_MEASURED_PX)
    return float(text_to_path.get_text_width_height_descent(latin, font, ismath=False)[0])


def wrap(text: str, width_px: float, size_px: float, most_lines: int) -> list[str]:
    """Break a text into at most `most_lines` lines of `width_px`; a text that is still too long loses its middle.

    Lines end after ' · ' if possible, else between words, else after punctuation within a name, else anywhere.
    """
    lines = _broken(text, width_px, size_px)
    kept = len(text)
    while len(lines) > most_lines and kept > 1:
        kept = max(1, min(kept - 1, int(kept * (most_lines + 0.5) / len(lines))))
        lines = _broken(shortened(text, kept), width_px, size_px)
    return lines


def num_shared(names: Iterable[str]) -> int:
    return sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False)))


def shortened(text: str, most: int) -> str:
    """Without its middle: names with one beginning mostly differ at the end."""
    head = most // 3
    tail = most - 1 - head
    return text if len(text) <= most else f"{text[:head]}…{text[len(text) - tail :]}"


def short_name(name: str) -> str:
    """One line, without control characters, at most 32."""
    return shortened(" ".join(plain(name).split()), _LONGEST_NAME)


def fitted(text: str, width_px: float, size_px: float) -> str:
    return wrap(text, width_px, size_px, 1)[0] if text_width(text, size_px) > width_px else text


def _broken(text: str, width_px: float, size_px: float) -> list[str]:
    lines = [""]
    for part in _parts(text, width_px, size_px, (r"(?<= · )", r"(?<= )", r"(?<=[._:/\-])", r"(?<=.)")):
        if lines[-1] and text_width((lines[-1] + part).rstrip(" ·"), size_px) > width_px:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def _parts(text: str, width_px: float, size_px: float, breaks: Sequence[str]) -> list[str]:
    if not breaks or text_width(text.rstrip(" ·"), size_px) <= width_px:
        return [text]
    cut = [part for part in re.split(breaks[0], text) if part]
    return [piece for part in cut for piece in _parts(part, width_px, size_px, breaks[1:])]
