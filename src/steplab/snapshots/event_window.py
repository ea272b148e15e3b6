"""Finds the events of known shapes in a window of bytes, and their numbers, all at once with numpy.

All places of the window where an event may begin are followed together: after each key and value of the shape, a cursor
stands where that place's next key would be. A place whose bytes differ from the shape is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.snapshots.history import NONE, Flags, Integers

_Bytes = NDArray[np.uint8]
_Words = NDArray[np.uint64]

ABSENT = {"address": NONE, "size_bytes": NONE, "stream": 0, "time_us": NONE}
"""The integer columns of Events, and their values for an event without the key."""

_OPENING = b"}\x94("
"""The opcodes EMPTY_DICT, MEMOIZE, MARK."""
_FRAMES_OPENING = b"]\x94"
_WORD_BYTES = 8

_WIDTH = np.zeros(256, dtype=np.int64)
"""The bytes of each instruction that fetches or makes a scalar; 0 for any other. Those of LONG1 and of texts come on
top."""
for _code, _width in {b"K": 2, b"M": 3, b"J": 5, b"h": 2, b"j": 5, b"N": 1, b"G": 9, b"\x88": 1, b"\x89": 1}.items():
    _WIDTH[_code[0]] = _width
_WIDTH[0x8A], _WIDTH[0x8C] = 2, 3
_LONG1, _TEXT, _MEMOIZE, _TUPLE2, _SET_ITEMS = 0x8A, 0x8C, 0x94, 0x86, ord("u")


@dataclass(frozen=True, slots=True)
class Shape:
    """The bytes that all events of one kind share."""

    keys: tuple[bytes, ...]
    """The instruction that fetches each key from the memo."""
    kinds: tuple[str, ...]
    """The kind of each value: an integer column of Events by name; action (a stored text); frames; scalar
    (anything); pair (a tuple of two scalars)."""


class EventWindow:
    """The complete events of known shapes in one window.

    Each array has one element for each place where an event may begin; places where none begins, or none that was
    understood to its last byte and is followed by the next, are marked.
    """

    def __init__(self, window: bytes, shapes: Sequence[Shape]) -> None:
        """Search for events; all shapes begin with the same key."""
        padded = window + bytes(2 * _WORD_BYTES)
        self._bytes: _Bytes = np.frombuffer(padded, dtype=np.uint8)
        self._words: _Words = np.ndarray(len(window) + _WORD_BYTES, dtype="<u8", buffer=padded, strides=(1,))
        """The eight bytes from each position on, as a number."""
        self.starts = self._candidates(_OPENING + shapes[0].keys[0])
        count = len(self.starts)
        self.action: Integers = np.full(count, NONE)
        """The memo's place of the action's name."""
        self.columns: dict[str, Integers] = {
            name: np.full(count, absent, dtype=np.int64) for name, absent in ABSENT.items()
        }
        self.frames_at: Integers = np.full(count, NONE)
        """The memo's place of the list of frames, if it is fetched from there; NONE otherwise."""
        self.text_begin: Integers = np.full(count, NONE)
        """The position at which a new list of frames begins; NONE for none."""
        self.num_memoized: Integers = np.zeros(count, dtype=np.int64)
        self._whole: Flags = np.zeros(count, dtype=bool)
        for shape in shapes:
            left = np.flatnonzero(~self._whole[:-1])
            if len(left):
                self._walk(shape, left)
        self._ends = np.flatnonzero(~self._whole)

    def find(self, position: int) -> tuple[int, int] | None:
        """The events from a position on: first and one past the last; None if none begins there."""
        first = int(np.searchsorted(self.starts, position))
        if first == len(self.starts) or self.starts[first] != position or not self._whole[first]:
            return None
        return first, int(self._ends[np.searchsorted(self._ends, first)])

    def forget(self, event: int) -> None:
        """Mark a place as not being an event."""
        self._whole[event] = False
        self._ends = np.flatnonzero(~self._whole)

    def _candidates(self, opening: bytes) -> Integers:
        """The positions of the bytes with which every event begins; at most eight bytes are compared."""
        opening = opening[:_WORD_BYTES]
        braces = np.flatnonzero(self._bytes == opening[0])
        return braces[self._is_at(braces, opening)]

    def _is_at(self, positions: Integers, wanted: bytes) -> Flags:
        """Whether up to eight bytes at each position are the wanted ones."""
        mask = np.uint64((1 << 8 * len(wanted)) - 1)
        same: Flags = (self._words[positions] & mask) == np.uint64(int.from_bytes(wanted, "little"))
        return same

    def _walk(self, shape: Shape, events: Integers) -> None:
        """Compare candidates with a shape, and keep those that match."""
        cursor, stop = self.starts[events] + len(_OPENING), self.starts[events + 1]
        fits = np.ones(len(events), dtype=bool)
        memoized: Integers = np.ones(len(events), dtype=np.int64)  # the dict itself
        read: dict[str, Integers] = {}
        for key, kind in zip(shape.keys, shape.kinds, strict=True):
            fits &= self._is_at(cursor, key)
            cursor = cursor + len(key)
            if kind in self.columns:
                read[kind], is_number = self._integers(cursor)
                fits &= is_number
            elif kind == "action":
                self_place, is_fetched = self._places(cursor)
                read[kind] = self_place
                fits &= is_fetched
            if kind == "frames":
                read["frames_at"], is_fetched = self._places(cursor)
                is_new = self._is_at(cursor, _FRAMES_OPENING)
                read["text_begin"] = np.where(is_new, cursor, NONE)
                fits &= is_fetched | is_new
                memoized += is_new
                cursor = np.where(is_new, stop - 1, cursor + _WIDTH[self._bytes[cursor]])
            else:
                for _ in range(2 if kind == "pair" else 1):
                    cursor = self._after_scalar(cursor, fits, memoized)
                if kind == "pair":
                    fits &= self._is_at(cursor, bytes((_TUPLE2, _MEMOIZE)))
                    memoized += 1
                    cursor = cursor + 2
            cursor = np.minimum(cursor, stop)  # one that does not match stays inside the window
        fits &= (cursor == stop - 1) & (self._bytes[stop - 1] == _SET_ITEMS)
        taken = events[fits]
        self._whole[taken] = True
        self.num_memoized[taken] = memoized[fits]
        for name, values in read.items():
            target = self.columns[name] if name in self.columns else getattr(self, name)
            target[taken] = values[fits]

    def _after_scalar(self, cursor: Integers, fits: Flags, memoized: Integers) -> Integers:
        """The cursors behind a scalar. Where there is none, `fits` is cleared; new texts are counted in `memoized`."""
        code = self._bytes[cursor]
        width = _WIDTH[code]
        fits &= width > 0
        is_text = code == _TEXT
        with_length = is_text | (code == _LONG1)
        width = width + np.where(with_length, self._bytes[cursor + 1], 0)
        after = np.minimum(cursor + width, len(self._words) - 1)
        fits &= ~is_text | (self._bytes[after - 1] == _MEMOIZE)
        memoized += is_text
        return after

    def _places(self, cursor: Integers) -> tuple[Integers, Flags]:
        """The memo's places that are fetched, and whether one is; NONE otherwise."""
        code, word = self._bytes[cursor], self._words[cursor + 1]
        short, long = code == ord("h"), code == ord("j")
        place = np.where(short, word & np.uint64(0xFF), word & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return np.where(short | long, place, NONE), short | long

    def _integers(self, cursor: Integers) -> tuple[Integers, Flags]:
        """The numbers that instructions make, and whether they make one of up to eight bytes."""
        code, length = self._bytes[cursor], self._bytes[cursor + 1]
        is_long = (code == _LONG1) & (length > 0) & (length <= _WORD_BYTES)
        unsigned = (code == ord("K")) | (code == ord("M"))
        fits = is_long | unsigned | (code == ord("J"))
        num_bytes = np.where(is_long, length, np.where(fits, _WIDTH[code] - 1, _WORD_BYTES)).astype(np.uint64)
        word = self._words[cursor + np.where(is_long, 2, 1)]
        shift = np.uint64(64) - np.uint64(8) * num_bytes
        raised = word << shift
        signed = raised.view(np.int64) >> shift.view(np.int64)
        return np.where(unsigned, (raised >> shift).view(np.int64), signed), fits
