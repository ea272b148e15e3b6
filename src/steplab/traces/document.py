"""A JSON trace as a whole: an object with `traceEvents` at any place among its members, or the bare array of events."""

import json
import re
from collections.abc import Collection

from steplab.limits import Limits
from steplab.traces.scanning import Scanner
from steplab.traces.splitting import EventSink, Splitter
from steplab.traces.window import Source, Window

CHUNK_BYTES = 1 << 19
"""The bytes decoded at a time, few enough to stay in the processor's cache."""
_LONGEST_MEMBER_BYTES = 1 << 20
"""Neither keys nor stored values are read beyond this length."""

_KEY = re.compile(rb'("(?:[^"\\]|\\.)*")\s*:', re.DOTALL)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


_MOST_LISTS = 8
"""The most lists of events that are read: reading one looks ahead, which would be repeated for each of a million."""
_FIRST_SCAN_BYTES = 1 << 6


class NotATrace(Exception):
    """The document is not a JSON object or array, or contains no event; the text gives the reason if it is known."""


class Document:
    """Reads a document once: events go to a sink, and chosen small members are stored."""

    def __init__(
        self,
        source: Source,
        limits: Limits | None = None,
        *,
        keep: Collection[str] = (),
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.members: dict[str, bytes] = {}
        """JSON text of the members named in `keep`, if they were found and are not huge."""
        self.has_events = False
        """Whether there was an array of events."""
        self.damage: str | None = None
        """How the document broke off, in words; None if it ended properly."""
        self.num_unreadable = 0
        """Events left out because they are not valid JSON."""
        self.num_oversized = 0
        """Events left out because of their length."""
        self._limits, self._keep, self._chunk_bytes = limits or Limits(), keep, chunk_bytes
        self._window = Window(source)
        self._num_lists = 0

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the document that could be read."""
        return self._window.num_read

    def read(self, sink: EventSink) -> None:
        """Read it to its end. Raises NotATrace if it begins as neither an object nor an array."""
        window = self._window
        window.fill(max(self._chunk_bytes, len(_BYTE_ORDER_MARK)))
        if window.data.startswith(_BYTE_ORDER_MARK, window.start, window.end):
            window.start += len(_BYTE_ORDER_MARK)
        first = self._next()
        window.start += 1
        if first == b"[":
            # Chrome's own traces may lack the closing bracket.
            self._events(sink, may_lack_end=True)
        elif first == b"{":
            while self._member(sink):
                pass
        else:
            raise NotATrace

    def _next(self) -> bytes:
        return self._window.next_byte(self._chunk_bytes)

    def _member(self, sink: EventSink) -> bool:
        """Read one member of the outer object and the comma behind it; returns False at the end."""
        window = self._window
        if self._next() == b"}":
            return False
        key = self._key()
        if key is None:
            self.damage = "the file ends early" if window.exhausted else "the file is no JSON any more"
            return False
        if key != "traceEvents" or self._next() != b"[":
            return self._value(key)
        if self._num_lists == _MOST_LISTS:
            self.damage = f"the file has more than {_MOST_LISTS} lists traceEvents"
            return False
        window.start += 1
        self._events(sink, may_lack_end=False)
        if self._next() == b",":
            window.start += 1
        return self.damage is None

    def _events(self, sink: EventSink, *, may_lack_end: bool) -> None:
        self.has_events = True
        self._num_lists += 1
        most_unreadable = self._limits.num_unreadable - self.num_unreadable
        splitter = Splitter(self._window, sink, self._chunk_bytes, most_unreadable)
        closed = splitter.run()
        self.num_unreadable += splitter.num_unreadable
        self.num_oversized += splitter.num_oversized
        if splitter.is_cut:
            self.damage = "the file ends in the middle of an event"
        elif not closed and not may_lack_end:
            self.damage = "the file ends before its list of events does"

    def _key(self) -> str | None:
        """The key of the member that begins here, with its colon consumed; None if there is no key here."""
        window = self._window
        found = _KEY.match(window.data, window.start, window.end)
        while not found and not window.exhausted and len(window) < _LONGEST_MEMBER_BYTES:
            window.fill(max(self._chunk_bytes, 2 * len(window)))
            found = _KEY.match(window.data, window.start, window.end)
        if not found:
            return None
        window.start = found.end()
        try:
            return str(json.loads(found[1].decode("utf-8", "replace"), strict=False))
        except ValueError:
            return ""

    def _value(self, key: str) -> bool:
        """Consume a member's value and the comma behind it; returns False if it was the last."""
        window, scanner, text = self._window, Scanner(), bytearray()
        most = _FIRST_SCAN_BYTES  # grows with the value, so that after many short values little is read ahead
        while True:
            if not len(window):
                window.fill(self._chunk_bytes)
            if not len(window):
                self.damage = "the file ends early"
                return False
            block = window.view(window.start, min(window.start + most, window.end))
            most = min(2 * most, self._chunk_bytes)
            found = scanner.feed(block)
            stop = found.commas[0] if found.commas else found.end
            size = len(block) if stop is None else stop
            if key in self._keep and len(text) <= _LONGEST_MEMBER_BYTES:
                text += window.view(window.start, window.start + size)
            window.start += size
            if stop is not None:
                break
        window.start += 1
        if key in self._keep and len(text) <= _LONGEST_MEMBER_BYTES:
            self.members[key] = bytes(text)
        return bool(found.commas)
