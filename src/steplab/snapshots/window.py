"""A file, plain or compressed by gzip or xz, as a window of bytes that moves over it."""

import gzip
import lzma
import zlib
from collections.abc import Callable
from typing import BinaryIO

from steplab.snapshots.refusal import Refused

OnProgress = Callable[[int, int], None]
"""Called with the bytes read of the file, and its size."""

GZIP_MAGIC, XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"
WINDOW_BYTES = 1 << 25
"""The bytes of a pickle that are in memory at a time."""


class Window:
    """The bytes in the window, and the means to move it on."""

    def __init__(
        self, file: BinaryIO, size_bytes: int, on_progress: OnProgress, *, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self.bytes = b""
        """The bytes in the window."""
        self.ended = False
        """Whether the window contains the end of the file."""
        self._file, self._size_bytes, self._on_progress = file, size_bytes, on_progress
        self._window_bytes = window_bytes
        head = file.read(len(XZ_MAGIC))
        file.seek(0)
        self._stream: gzip.GzipFile | lzma.LZMAFile | BinaryIO = file
        if head.startswith(GZIP_MAGIC):
            self._stream = gzip.GzipFile(fileobj=file)
        elif head == XZ_MAGIC:
            self._stream = lzma.LZMAFile(file)  # noqa: SIM115  # whoever opened the file closes it

    def move(self, begin: int) -> None:
        """Drop what lies before `begin` and read on; afterwards `bytes` starts there."""
        parts = [self.bytes[begin:]]
        missing = self._window_bytes - len(parts[0])
        while missing > 0 and not self.ended:
            part = self._read(missing)
            self.ended = not part
            parts.append(part)
            missing -= len(part)
        self.bytes = b"".join(parts)
        self._on_progress(self._file.tell(), self._size_bytes)

    def _read(self, most: int) -> bytes:
        try:
            return self._stream.read(most)
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            packed = "xz" if isinstance(self._stream, lzma.LZMAFile) else "gzip"
            raise Refused(f"its {packed} stream is damaged or ends early ({error})") from error
