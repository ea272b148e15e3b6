"""A stretch of a document in memory that moves along it."""

import re
from typing import Protocol

_SPACE = re.compile(rb"[ \t\r\n]*")


class Source(Protocol):
    def readinto(self, view: memoryview, /) -> int:
        """Fill `view` from the left; returns the bytes read, 0 only at the end."""


class Window:
    """Bytes `start` to `end` of the document in `data`.

    One free byte on each side lets a piece be decoded in place with brackets around it.
    """

    def __init__(self, source: Source) -> None:
        self.data = bytearray(2)
        self.start = self.end = 1
        self.exhausted = False
        self.num_read = 0
        self._source = source

    def __len__(self) -> int:
        return self.end - self.start

    def view(self, start: int, end: int) -> memoryview:
        """They change with the next fill."""
        return memoryview(self.data)[start:end]

    def fill(self, size: int) -> None:
        """Read until the window holds `size` bytes or the document ends."""
        if len(self) >= size or self.exhausted:
            return
        kept = self.data[self.start : self.end]
        if len(self.data) < size + 2:
            # A new buffer: the old one cannot grow while decoded values refer to it.
            self.data = bytearray(size + 2)
        self.data[1 : 1 + len(kept)] = kept
        self.start, self.end = 1, 1 + len(kept)
        while len(self) < size and not self.exhausted:
            count = self._source.readinto(self.view(self.end, 1 + size))
            self.end += count
            self.num_read += count
            self.exhausted = count == 0

    def next_byte(self, chunk_bytes: int) -> bytes:
        """Skip white space; returns the next byte without consuming it, b'' at the end."""
        while True:
            found = _SPACE.match(self.data, self.start, self.end)
            self.start = found.end() if found else self.start
            if self.start < self.end or self.exhausted:
                return bytes(self.data[self.start : min(self.start + 1, self.end)])
            self.fill(chunk_bytes)
