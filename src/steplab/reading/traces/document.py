"""A JSON trace of any size: an object with `traceEvents` anywhere among its members, or the bare array.

Events may be gigabytes, so they are cut into pieces of some hundred kilobytes that a decoder reads whole. A piece ends
at the last text that looks like a seam between two events. If the decoder accepts it in brackets, it was a seam: a JSON
parser reads left to right, so whole values behind `[` end at the same place in file and piece. Otherwise events are
taken one by one, by Python's parser.

Damage costs its event: reading continues behind the next seam.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

_BLANKS = re.compile(rb"[ \t\r\n]*")


class Source(Protocol):
    def readinto(self, view: memoryview, /) -> int:
        """Fill `view` from the left and return the number of bytes read, 0 only at the end."""


class Window:
    """Part of the document in memory: bytes `start` to `end` of `data`. A spare byte on each side takes brackets, so
    that a piece is decoded in place.
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
        """The unread bytes, valid until the next fill."""
        return memoryview(self.data)[start:end]

    def fill(self, size: int) -> None:
        """Read until `size` bytes are unread or the document ends."""
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
            found = _BLANKS.match(self.data, self.start, self.end)
            self.start = found.end() if found else self.start
            if self.start < self.end or self.exhausted:
                return bytes(self.data[self.start : min(self.start + 1, self.end)])
            self.fill(chunk_bytes)


CHUNK_BYTES = 1 << 19
"""Bytes decoded at once, few enough for the processor's cache."""
_FIRST_BYTES = 1 << 6

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SEAM = re.compile(rb'}\s*,\s*{\s*(?:"[^"\\]{0,64}")?')
_FIRST_EVENT = re.compile(rb'\s*?(\r?\n[ \t]+{\s*"[^"\\]{0,64}")')
_INDENTED_SEAM = re.compile(rb'},\r?\n([ \t]+){\r?\n\1[ \t]+"')
_LAST_EVENT = re.compile(rb"}\s*(?=\])")
_SEAM_REGION_BYTES = 1 << 14
_LONGEST_SEAM_BYTES = 1 << 8
_OPEN, _CLOSE = b"["[0], b"]"[0]
_SPACE, _BETWEEN = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")
_PARSER = json.JSONDecoder(strict=False, parse_int=str, parse_float=str, parse_constant=str)
_LONGEST_TOKEN = len("-Infinity,")
_DAMAGED = -1


class NotATrace(Exception):
    """Document is no JSON object or array, or has no events; the text is the reason, if known."""


class EventSink(Protocol):
    def take(self, array: memoryview) -> bool:
        """Take all events of a JSON array; return False, having taken none, if it cannot be decoded."""

    def salvage(self, elements: Sequence[memoryview]) -> int:
        """Take events one by one; return the number that cannot be read."""


class Document:
    """Read a document once: pass events to a sink, keep chosen members."""

    def __init__(self, source: Source, *, keep: Collection[str] = (), chunk_bytes: int = CHUNK_BYTES) -> None:
        self.members: dict[str, bytes] = {}
        """JSON text of members named in `keep`."""
        self.has_events = False
        """True if the document has an array of events."""
        self.damage: str | None = None
        """Description of a premature end; None if the document is complete."""
        self.num_unreadable = 0
        """Number of events omitted as invalid JSON or too long."""
        self._keep, self._chunk_bytes = keep, chunk_bytes
        self._window = Window(source)
        self._seam = b""
        """Text between two events where pieces were last divided, from brace to first key."""

    @property
    def num_bytes(self) -> int:
        return self._window.num_read

    def read(self, sink: EventSink) -> None:
        """Read to the end. Raises NotATrace if it begins as neither an object nor an array."""
        window = self._window
        window.fill(max(self._chunk_bytes, len(_BYTE_ORDER_MARK)))
        if window.data.startswith(_BYTE_ORDER_MARK, window.start, window.end):
            window.start += len(_BYTE_ORDER_MARK)
        first = self._next()
        window.start += 1
        if first == b"[":
            # Chrome's traces may lack the closing bracket.
            self._events(sink, may_lack_end=True)
        elif first == b"{":
            while self._member(sink):
                pass
        else:
            raise NotATrace

    def _next(self) -> bytes:
        return self._window.next_byte(self._chunk_bytes)

    def _member(self, sink: EventSink) -> bool:
        window = self._window
        if self._next() == b"}":
            return False
        key = self._value(":")
        if key is None:
            return False
        if self._next() != b":" or not key.startswith(b'"'):
            self.damage = "the file stops being JSON" if self._next() else "the file ends early"
            return False
        window.start += 1
        name = json.loads(key.decode("utf-8", "replace"), strict=False)
        if self._next() == b"[" and name == "traceEvents":
            window.start += 1
            self._events(sink, may_lack_end=False)
        elif (value := self._value("}")) is not None and name in self._keep:
            self.members[name] = value
        if self._next() == b",":
            window.start += 1
        return self.damage is None

    def _value(self, close: str) -> bytes | None:
        """The next value, which a comma or `close` follows; None if it is damaged."""
        window, most = self._window, _FIRST_BYTES  # grows with the value, so short ones read little ahead
        while True:
            window.fill(most)
            is_all = window.exhausted and len(window) <= most
            end = _end_of_value(self._text(most), 0, close, is_all=is_all)
            if end == _DAMAGED or (end is None and is_all):
                self.damage = "the file ends early" if end is None else "the file stops being JSON"
                return None
            if end is not None:
                value = bytes(window.view(window.start, window.start + end))
                window.start += end
                return value
            most *= 2

    def _text(self, most: int | None = None) -> str:
        window = self._window
        end = window.end if most is None else min(window.start + most, window.end)
        return str(window.view(window.start, end), "latin-1")

    # --- events -----------------------------------------------------------------------------------------------

    def _events(self, sink: EventSink, *, may_lack_end: bool) -> None:
        """Pass the array's events to the sink, including its closing bracket."""
        self.has_events = True
        window, closed = self._window, None
        window.fill(self._chunk_bytes)
        first = _FIRST_EVENT.match(window.data, window.start, window.end)
        self._seam = b"}," + first[1] if first else b""
        while closed is None:
            window.fill(self._chunk_bytes)
            if not self._quick(sink):
                closed = self._careful(sink)
        if not closed and not may_lack_end and self.damage is None:
            self.damage = "the file ends within its list of events"

    def _quick(self, sink: EventSink) -> bool:
        """Pass events up to a seam near the window's end; False if there is no seam."""
        for brace, seam in self._seams():
            if self._take(sink, brace + 1 - self._window.start):
                self._seam = seam
                self._window.start = brace + seam.index(b",") + 1
                return True
        return False

    def _seams(self) -> Iterator[tuple[int, bytes]]:
        window = self._window
        # Deeper objects seldom have the same indentation and first key.
        likely = window.data.rfind(self._seam, window.start, window.end) if self._seam else -1
        if likely >= 0:
            yield likely, self._seam
        region = max(window.start, window.end - _SEAM_REGION_BYTES)
        for found in reversed(list(_SEAM.finditer(window.data, region, window.end))[-2:]):
            if found.start() != likely:
                yield found.start(), found[0]

    def _take(self, sink: EventSink, length: int) -> bool:
        """Offer the window's first bytes as an array, with brackets written around them in place."""
        window, start = self._window, self._window.start
        end = start + length
        before, behind = window.data[start - 1], window.data[end]
        window.data[start - 1], window.data[end] = _OPEN, _CLOSE
        taken = sink.take(window.view(start - 1, end + 1))
        window.data[start - 1], window.data[end] = before, behind
        return taken

    def _careful(self, sink: EventSink) -> bool | None:
        """Pass the window's events one by one; return if the array was closed, None to continue. Consumes at least one
        event, however large the window must become.
        """
        window, text, place = self._window, self._text(), 0
        elements, ends = list[memoryview](), list[int]()
        closed, is_lost = None, False
        while not is_lost:
            place = _end_of(_BETWEEN, text, place)
            if place == len(text):
                closed = False if window.exhausted else None
                break
            if text[place] == "]":
                place, closed = place + 1, True
                break
            end = _end_of_value(text, place, "]", is_all=window.exhausted)
            if end is None and not window.exhausted:
                if place:
                    break
                window.fill(2 * len(text))
                text = self._text()
            elif end is None and not self._goes_on_behind(place):
                self.damage = "the file ends in the middle of an event"
                place, closed = len(text), False
                break
            elif end is None or end == _DAMAGED:
                self.num_unreadable += 1
                behind = self._behind_seam(window.start + place)
                is_lost = behind is None
                place = place + 1 if behind is None else behind - window.start
            else:
                elements.append(window.view(window.start + place, window.start + end))
                ends.append(place := end)
        self.num_unreadable += sink.salvage(elements)
        for end in ends[-2:]:
            if seam := _SEAM.match(window.data, window.start + end - 1, window.end):
                self._seam = seam[0]
        window.start += place
        return self._search() if is_lost else closed

    def _goes_on_behind(self, place: int) -> bool:
        """True if the event at `place` is damaged and not merely cut off: an indented seam, which cannot lie inside an
        event, follows in the window.
        """
        is_certain = _INDENTED_SEAM.match(self._seam) is not None
        return is_certain and self._behind_seam(self._window.start + place) is not None

    def _behind_seam(self, position: int) -> int | None:
        """Start of the event behind the next seam in the window; None without a seam."""
        window = self._window
        if _INDENTED_SEAM.match(self._seam):
            found = window.data.find(self._seam, position, window.end)
            return None if found < 0 else found + self._seam.index(b",") + 1
        match = _SEAM.search(window.data, position, window.end)
        return match.start() + match[0].index(b",") + 1 if match else None

    def _search(self) -> bool | None:
        """Skip to the next seam; False if the document ends first, None to continue."""
        window = self._window
        while True:
            window.fill(len(window) + self._chunk_bytes)
            behind = self._behind_seam(window.start)
            if behind is None and window.exhausted:
                last = _LAST_EVENT.search(window.data, window.start, window.end)
                behind = last.end() if last else None
            if behind is not None:
                window.start = behind
                return None
            if window.exhausted:
                self.damage = "the file ends in the middle of an event"
                window.start = window.end
                return False
            window.start = max(window.start, window.end - _LONGEST_SEAM_BYTES)  # the end may cut one


def _end_of(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place


def _end_of_value(text: str, place: int, close: str, *, is_all: bool) -> int | None:
    """End of the JSON value at a place; None if it may continue behind the text, _DAMAGED if invalid.

    A comma or the bracket `close` must follow; `is_all`: the document ends with the text.
    """
    try:
        end = _PARSER.raw_decode(text, place)[1]
    except RecursionError:
        return _DAMAGED
    except json.JSONDecodeError as error:
        is_cut = error.pos > len(text) - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
        return None if is_cut else _DAMAGED
    behind = _end_of(_SPACE, text, end)
    if behind == len(text):
        return end if is_all else None
    return end if text[behind] in (",", close) else _DAMAGED
