"""A file as a window of bytes that moves over it."""

from steplab.snapshots.refusal import Refused
from steplab.unpacking import Unpacked

WINDOW_BYTES = 1 << 25
"""The bytes of a pickle that are in memory at a time."""


class Window:
    """The bytes in the window, and the means to move it on."""

    def __init__(self, file: Unpacked, *, window_bytes: int = WINDOW_BYTES) -> None:
        self.bytes = b""
        """The bytes in the window."""
        self.ended = False
        """Whether the window contains the end of the file."""
        self._file, self._window_bytes = file, window_bytes

    def move(self, begin: int) -> None:
        """Drop what lies before `begin` and read on; afterwards `bytes` starts there."""
        parts = [self.bytes[begin:]]
        missing = self._window_bytes - len(parts[0])
        while missing > 0 and not self.ended:
            part = self._file.read(missing) or b""
            if self._file.damage:
                raise Refused(f"its {self._file.damage.removeprefix('the ')}")
            self.ended = not part
            parts.append(part)
            missing -= len(part)
        self.bytes = b"".join(parts)
