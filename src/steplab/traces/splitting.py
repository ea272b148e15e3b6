"""The events of a JSON trace of any size, cut into pieces that a decoder reads whole.

The events are one array, often of gigabytes. A piece is what lies between one event's beginning and the end of another,
some hundred kilobytes on; put in brackets it is an array by itself.

Where to cut is tried rather than computed: the last text in the window that looks like the seam between two events
is taken for one, and if the decoder accepts the bracketed piece, it was one. That is no guess. A JSON parser reads
from left to right and never goes back, so a piece that reads as whole values behind `[` leaves it, in the file as in
the piece, behind a value of the array. A seam inside a string or deeper inside an event leaves it elsewhere, and the
piece is refused. Only then is the text followed byte by byte (scanning.py), which takes longer than decoding it.

Damage costs the event it is in. In an indented file the event after an unreadable one is found by its seam, even where
a stray quote turned everything behind it inside out: no string contains a line break, and what lies deeper inside an
event is indented further.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from steplab.limits import LimitReached
from steplab.traces.scanning import Scanner
from steplab.traces.window import Window

LONGEST_EVENT_BYTES = 1 << 24
"""An event longer than this is left out, so that memory stays bounded."""
_MOST_GONE_BACK = 4
"""Starting again behind an unreadable event reads the text behind it once more. Altogether that is at most this many
times the document so far, so that the time for a badly damaged file is still proportional to its size."""

_SEAM = re.compile(rb'}\s*,\s*{\s*(?:"[^"\\]{0,64}")?')
_FIRST_EVENT = re.compile(rb'\s*?(\r?\n[ \t]+{\s*"[^"\\]{0,64}")')
_INDENTED_SEAM = re.compile(rb'},\r?\n([ \t]+){\r?\n\1[ \t]+"')
_SEAM_REGION_BYTES = 1 << 14
_OBJECT = re.compile(rb"\s*{")
_OPEN, _CLOSE = b"["[0], b"]"[0]


class EventSink(Protocol):
    """The receiver of the events."""

    def take(self, array: memoryview) -> bool:
        """Take all events of a JSON array; returns False, with none taken, if it cannot be decoded."""

    def salvage(self, elements: Iterable[memoryview], goes_on: Callable[[int], bool]) -> bool:
        """Take events one by one. `goes_on` is called with the number of each element that cannot be read; if it
        returns False, that element was the last, and this returns False too."""


class Splitter:
    """Passes the elements of one array to a sink, from behind its opening bracket to behind the closing one."""

    def __init__(self, window: Window, sink: EventSink, chunk_bytes: int, most_unreadable: int) -> None:
        """Raises LimitReached from `run` where more than `most_unreadable` elements are no events."""
        self.num_unreadable = 0
        """Events left out because they are not valid JSON."""
        self.num_oversized = 0
        """Events left out because of their length."""
        self.is_cut = False
        """Whether the document ended in the middle of an event."""
        self._window, self._sink, self._chunk_bytes = window, sink, chunk_bytes
        self._most_unreadable = most_unreadable
        self._seam = b""
        """The text between the last two divided events, from the brace to the first key."""
        self._gone_back_bytes = 0
        """The bytes that had to be read again after starting elsewhere."""

    def run(self) -> bool:
        """Pass all elements on; returns False if the document ends before the array does."""
        window, closed = self._window, None
        window.fill(self._chunk_bytes)
        if first := _FIRST_EVENT.match(window.data, window.start, window.end):
            self._seam = b"}," + first[1]
        while closed is None:
            window.fill(self._chunk_bytes)
            if not self._quick():
                closed = self._careful()
        return closed

    def _quick(self) -> bool:
        """Take the text before a seam near the end of the window; returns False if there is no seam, or it is not
        one."""
        for brace, seam in self._seams():
            if self._take(brace + 1 - self._window.start):
                self._seam = seam
                self._window.start = brace + seam.index(b",") + 1
                return True
        return False

    def _seams(self) -> Iterator[tuple[int, bytes]]:
        """Places that may be a seam, the likeliest first, each with its text."""
        window = self._window
        # Objects deeper in an event seldom have the same indentation and the same first key.
        likely = window.data.rfind(self._seam, window.start, window.end) if self._seam else -1
        if likely >= 0:
            yield likely, self._seam
        region = max(window.start, window.end - _SEAM_REGION_BYTES)
        for found in reversed(list(_SEAM.finditer(window.data, region, window.end))[-2:]):
            if found.start() != likely:
                yield found.start(), found[0]

    def _take(self, length: int) -> bool:
        """Offer the sink the first bytes of the window as an array, with brackets written around them in place."""
        window, start = self._window, self._window.start
        end = start + length
        before, behind = window.data[start - 1], window.data[end]
        window.data[start - 1], window.data[end] = _OPEN, _CLOSE
        taken = self._sink.take(window.view(start - 1, end + 1))
        window.data[start - 1], window.data[end] = before, behind
        return taken

    def _careful(self) -> bool | None:
        """Scan the text to certain divisions between elements; returns whether the array was closed, None to go on.

        At least one element is consumed, however long the window must grow for it.
        """
        window, scanner, scanned = self._window, Scanner(), 0
        while True:
            found = scanner.feed(window.view(window.start + scanned, window.end))
            if found.commas or found.end is not None or window.exhausted:
                break
            scanned = len(window)
            if scanned >= LONGEST_EVENT_BYTES:
                return self._skip(scanner)
            window.fill(2 * scanned)
        stops = [scanned + offset for offset in found.commas]
        if found.end is not None:
            stops.append(scanned + found.end)
        if stops:
            if not (self._take(stops[-1]) or self._salvage(stops)):
                return None
            self._learn(stops[-1])
            window.start += stops[-1] + 1
        if found.end is not None:
            return True
        return self._rest() if window.exhausted else None

    def _salvage(self, stops: list[int]) -> bool:
        """Pass on the elements before each stop one by one; returns False if an unreadable one made the splitter
        start elsewhere."""
        window, start = self._window, self._window.start
        starts = [start, *(start + stop + 1 for stop in stops)]
        last_seam = self._last_seam()

        def goes_on(number: int) -> bool:
            self.num_unreadable += 1
            if self.num_unreadable > self._most_unreadable:
                raise LimitReached(f"more than {self._most_unreadable:,} elements of its list are no events")
            return not self._resume(starts[number], last_seam)

        elements = (window.view(begin, start + stop) for begin, stop in zip(starts, stops, strict=False))
        return self._sink.salvage(elements, goes_on)

    def _rest(self) -> bool | None:
        """Handle the document's end: its last event is either still whole, or lost."""
        window = self._window
        rest = window.view(window.start, window.end)
        if not self._sink.salvage([rest], lambda number: False):
            if self._resume(window.start, self._last_seam()):
                self.num_unreadable += 1
                return None
            self.is_cut = True
        window.start = window.end
        return False

    def _last_seam(self) -> int:
        """The place of the last seam in the window; -1 if there is none, or if this file's seams can lie within an
        event."""
        if not _INDENTED_SEAM.match(self._seam):
            return -1
        return self._window.data.rfind(self._seam, self._window.start, self._window.end)

    def _resume(self, position: int, last_seam: int) -> bool:
        """Start again behind the next seam, if there is one and this should be an event."""
        window = self._window
        if position > last_seam or not _OBJECT.match(window.data, position, window.end):
            return False
        back = window.end - position
        if self._gone_back_bytes + back > _MOST_GONE_BACK * window.num_read:
            return False
        self._gone_back_bytes += back
        window.start = window.data.index(self._seam, position, window.end) + self._seam.index(b",") + 1
        return True

    def _learn(self, stop: int) -> None:
        """Remember the seam at a comma that certainly divides two events."""
        window = self._window
        brace = window.data.rfind(b"}", window.start, window.start + stop)
        found = _SEAM.match(window.data, brace, window.end) if brace >= 0 else None
        if found and found[0].index(b",") == window.start + stop - brace:
            self._seam = found[0]

    def _skip(self, scanner: Scanner) -> bool | None:
        """Skip an element that is too long to hold."""
        window = self._window
        if self._resume(window.start, self._last_seam()):
            self.num_unreadable += 1
            return None
        self.num_oversized += 1
        while True:
            window.start = window.end
            window.fill(self._chunk_bytes)
            if not len(window):
                self.is_cut = True
                return False
            found = scanner.feed(window.view(window.start, window.end))
            if found.commas or found.end is not None:
                window.start += 1 + (found.commas[0] if found.commas else found.end or 0)
                return None if found.commas else True
