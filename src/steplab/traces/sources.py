"""A trace file as a stream of plain bytes, compressed or not."""

import zlib
from collections.abc import Callable
from io import FileIO
from typing import Protocol

OnProgress = Callable[[int, int], None]
"""Called with the bytes read of the file, and its size."""

GZIP_MAGIC = b"\x1f\x8b"
_INPUT_BYTES = 1 << 18


class Source(Protocol):
    """A source of a document's bytes."""

    damage: str | None
    """Why the stream ended early, in words; None if it did not."""

    def readinto(self, view: memoryview) -> int:
        """Fill `view` from the left; returns the number of bytes, 0 only at the end."""


class PlainSource:
    """The bytes of an uncompressed file."""

    def __init__(self, file: FileIO, size_bytes: int, on_progress: OnProgress) -> None:
        self.damage: str | None = None
        self._file, self._size_bytes, self._on_progress = file, size_bytes, on_progress

    def readinto(self, view: memoryview) -> int:
        filled = self._file.readinto(view) or 0
        self._on_progress(self._file.tell(), self._size_bytes)
        return filled


class GzipSource:
    """The bytes in a gzip file of any number of members, up to the first damage."""

    def __init__(self, file: FileIO, size_bytes: int, on_progress: OnProgress) -> None:
        self.damage: str | None = None
        self._file, self._size_bytes, self._on_progress = file, size_bytes, on_progress
        self._member = zlib.decompressobj(wbits=31)
        self._input = b""
        self._ended = False

    def readinto(self, view: memoryview) -> int:
        filled = 0
        while filled < len(view) and not self._ended:
            data = self._some(len(view) - filled)
            view[filled : filled + len(data)] = data
            filled += len(data)
        return filled

    def _some(self, most: int) -> bytes:
        if self._member.eof:
            # A member is followed by another one or, by the gzip format, by padding, which is ignored.
            self._input = (self._member.unused_data or self._more()).lstrip(b"\0")
            if not self._input.startswith(GZIP_MAGIC):
                self._ended = True
                return b""
            self._member = zlib.decompressobj(wbits=31)
        self._input = self._input or self._more()
        exhausted = not self._input
        try:
            data = self._member.decompress(self._input, most)
        except zlib.error as error:
            self._end(f"the gzip stream is damaged ({error})")
            return b""
        if exhausted and not data:
            self._end("the gzip stream ends early")
        self._input = self._member.unconsumed_tail
        return data

    def _more(self) -> bytes:
        data = self._file.read(_INPUT_BYTES)
        self._on_progress(self._file.tell(), self._size_bytes)
        return data

    def _end(self, damage: str) -> None:
        self.damage = damage
        self._ended = True
