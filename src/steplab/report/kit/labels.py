"""Measures and shortens labels, with the widths of DejaVu Sans, which is wider than browsers' usual fonts."""

import functools
import unicodedata

from steplab.printing import plain

_MEASURED_PX = 100.0
_LONGEST_NAME = 32


def text_width(text: str, size_px: float) -> float:
    return sum(map(_letter_width, text)) * size_px / _MEASURED_PX


@functools.cache
def _letter_width(letter: str) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    # The measured font lacks East Asian glyphs; its 'W' is about as wide.
    latin = "W" if unicodedata.east_asian_width(letter) in "WF" else letter
    font = FontProperties(family="DejaVu Sans", size=_MEASURED_PX)
    return float(text_to_path.get_text_width_height_descent(latin, font, ismath=False)[0])


def cut(text: str, most: int) -> str:
    """Text without its middle, if it is longer than `most` characters."""
    tail = most // 2
    return text if len(text) <= most else f"{text[: most - tail - 1]}…{text[-tail:]}"


def short_name(name: str) -> str:
    return cut(" ".join(plain(name).split()), _LONGEST_NAME)
