"""Finds where the elements of a JSON container are divided, by following strings, escapes and nesting byte by byte.

This is slow and certain, for what the quick method in splitting.py cannot cut. It checks nothing else: whether the text
between two commas is JSON is the decoder's question.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

_QUOTE, _BACKSLASH, _COMMA = b'"'[0], b"\\"[0], b","[0]
_DEPTH = np.zeros(256, dtype=np.int8)
_DEPTH[list(b"[{")] = 1
_DEPTH[list(b"]}")] = -1
_STRUCTURAL = _DEPTH != 0
_STRUCTURAL[_COMMA] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """The divisions that a scanner found in one block, as offsets from the block's beginning."""

    commas: list[int]
    """The commas between elements of the container itself, up to its end."""
    end: int | None
    """The bracket that closes the container; None if it is not in this block."""


class Scanner:
    """Scans the inside of an array or object from its beginning, block by block, until its end."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        """Whether the previous block ended in a backslash that escapes the first byte of the next."""

    def feed(self, block: memoryview) -> Parting:
        """Scan one more block."""
        data = np.frombuffer(block, dtype=np.uint8)
        if not len(data):
            return Parting(commas=[], end=None)
        quotes = self._unescaped_quotes(data)
        structural = np.flatnonzero(_STRUCTURAL[data])
        inside = (np.searchsorted(quotes, structural) + self._in_string) % 2 == 1
        structural = structural[~inside]
        depth = self._depth + np.cumsum(_DEPTH[data[structural]], dtype=np.int64)
        self._in_string ^= bool(len(quotes) % 2)
        self._depth = int(depth[-1]) if len(depth) else self._depth
        ends = np.flatnonzero(depth < 0)
        if len(ends):
            structural, depth = structural[: ends[0] + 1], depth[: ends[0] + 1]
        commas = structural[(depth == 0) & (data[structural] == _COMMA)]
        return Parting(commas=commas.tolist(), end=int(structural[-1]) if len(ends) else None)

    def _unescaped_quotes(self, data: NDArray[np.uint8]) -> Positions:
        """The quotes that begin or end a string: those behind an even number of backslashes."""
        quotes = np.flatnonzero(data == _QUOTE)
        backslashes = np.flatnonzero(data == _BACKSLASH)
        if self._escaped:
            quotes, backslashes = quotes[quotes > 0], backslashes[backslashes > 0]
        self._escaped = False
        if not len(backslashes):
            return quotes
        first = np.flatnonzero(np.diff(backslashes, prepend=-2) != 1)
        length = np.diff(first, append=len(backslashes))
        escaped = (backslashes[first] + length)[length % 2 == 1]
        self._escaped = bool(len(escaped)) and int(escaped[-1]) == len(data)
        return quotes[~np.isin(quotes, escaped)]
