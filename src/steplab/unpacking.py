"""Reads files that are plain, gzip or xz, recognised by their content."""

import errno
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from steplab.limits import LimitReached
from steplab.units import MIB, format_bytes

OnProgress = Callable[[int, int], None]
"""(bytes of the file read so far, its size in bytes), called at each read."""

GZIP_MAGIC, XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"
_INPUT_BYTES = 1 << 18
_SMALL_BYTES = 64 * MIB
"""Most bytes that `small_file` returns."""
_UNPACKER_BYTES = 256 * MIB
"""Most memory for decompressing an xz file, which states how much it needs."""


def unwatched(done_bytes: int, size_bytes: int) -> None:
    """Ignores progress."""


class Unpacked(io.RawIOBase):
    """Raw stream of a file's decompressed content, up to its end or first damage.

    Reading raises LimitReached beyond `most_bytes`, and OSError as the file does.
    """

    def __init__(
        self,
        file: IO[bytes],
        on_progress: OnProgress = unwatched,
        *,
        size_bytes: int = 0,
        most_bytes: int | None = None,
    ) -> None:
        """`file` is read from its position and stays open."""
        super().__init__()
        self.damage: str | None = None
        """Why a compressed stream ended early; None if it did not."""
        self._file, self._most_bytes = file, most_bytes
        self._on_progress, self._size_bytes = on_progress, size_bytes
        self._num_in = self._num_out = 0
        head = file.read(len(XZ_MAGIC))
        while 0 < len(head) < len(XZ_MAGIC) and (more := file.read(len(XZ_MAGIC) - len(head))):
            head += more  # pipes may give less
        self._input = head
        self._num_in += len(head)
        self._magic = next((magic for magic in _PACKINGS if head.startswith(magic)), b"")
        self._member: Any = None
        """Decompressor of one stream, of which a file may have several."""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` from the left; returns the bytes read, 0 only at the end."""
        view = memoryview(buffer).cast("B")
        count = self._copy(view) if not self._magic else self._unpack(view)
        self._num_out += count
        if self._most_bytes is not None and self._num_out > self._most_bytes:
            raise LimitReached(f"it has more than {format_bytes(self._most_bytes)}")
        self._on_progress(self._num_in, self._size_bytes)
        return count

    def _copy(self, view: memoryview) -> int:
        if self._input:
            count = min(len(self._input), len(view))
            view[:count], self._input = self._input[:count], self._input[count:]
            return count
        count = self._file.readinto(view) or 0  # type: ignore[attr-defined]
        self._num_in += count
        return int(count)

    def _unpack(self, view: memoryview) -> int:
        filled = 0
        while filled < len(view) and not self._ended:
            data = self._some(len(view) - filled)
            view[filled : filled + len(data)] = data
            filled += len(data)
        return filled

    def _some(self, most: int) -> bytes:
        name, decompressor = _PACKINGS[self._magic]
        if self._member is None or self._member.eof:
            # Another member or padding follows a member; the rest is ignored.
            rest = self._member.unused_data if self._member else self._input
            self._input = (rest or self._more()).lstrip(b"\0")
            if not self._input.startswith(self._magic[: len(self._input) or 1]):
                self._ended = True
                return b""
            self._member = decompressor()
        if not self._input and self._member.needs_input:
            self._input = self._more()
            if not self._input:
                self._end(f"the {name} stream ends early")
                return b""
        try:
            data, self._input = self._member.decompress(self._input, most), b""
        except (lzma.LZMAError, zlib.error, EOFError) as error:
            is_huge = "emory" in str(error)
            why = f"takes more than {format_bytes(_UNPACKER_BYTES)} to unpack" if is_huge else f"is damaged ({error})"
            self._end(f"the {name} stream {why}")
            return b""
        return bytes(data)

    def _more(self) -> bytes:
        data = self._file.read(_INPUT_BYTES)
        self._num_in += len(data)
        return data

    def _end(self, damage: str) -> None:
        self.damage, self._ended = damage, True


def small_file(path: Path) -> bytes:
    """Decompressed content of a small file: a study, grid, configuration, table or marks.

    Raises OSError as files do, also for damage or more than 64 MiB.
    """
    try:
        with path.open("rb", buffering=0) as file:
            unpacked = Unpacked(file, most_bytes=_SMALL_BYTES)
            content = b"".join(iter(lambda: unpacked.read(_INPUT_BYTES), b""))
    except LimitReached as error:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(_SMALL_BYTES)}") from error
    except ValueError as error:  # a null character in the name
        raise OSError(errno.EINVAL, str(error)) from error
    if unpacked.damage:
        raise OSError(errno.EIO, unpacked.damage)
    return content


class _Gzip:
    """A gzip stream with LZMADecompressor's interface: it keeps input that `max_length` left, for the next call."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)  # its window is 32 KiB

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # eof, unused_data

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, max_length)


_PACKINGS: dict[bytes, tuple[str, Callable[[], Any]]] = {
    GZIP_MAGIC: ("gzip", _Gzip),
    XZ_MAGIC: ("xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_UNPACKER_BYTES)),
}
"""Name and decompressor of a format, by a file's first bytes."""
