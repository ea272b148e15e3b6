"""Events of a pickle in bulk: many alike dicts, one after the other, taken into columns without being built.

torch writes an event as a dict of eight or nine keys. In protocols 4 and 5 each such dict is the same bytes but for
its numbers, because the keys, the names of actions and the frames were pickled before and are fetched from the memo:

    }  MEMOIZE  (  GET "action"  GET "alloc"  GET "addr"  LONG1 …  …  GET "frames"  ] MEMOIZE ( GET… e  u

The machine builds the first event of a kind and has it learned here as a Shape; from then on all places of a window
where such a dict may begin are compared to the known shapes at once, by numpy. An event counts only if it was
understood to its last byte and the next one begins there; anything else is left to the machine. So nothing is guessed,
and what comes out is what the machine would have built.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from steplab.limits import LimitReached, Limits
from steplab.snapshots.event_window import EventWindow, Shape
from steplab.snapshots.history import ACTIONS, NONE, OTHER, Events, Integers, Numbers
from steplab.snapshots.stacks import Stacks

_MOST_SHAPES = 32
_MOST_AT_ONCE = 512
"""The most events of a run: after one that cannot be resolved, the rest was compared in vain."""
_COLUMNS = {"addr": "address", "size": "size_bytes", "stream": "stream", "time_us": "time_us"}
_STACK_TEXT = re.compile(rb"\]\x94(?:\(((?:h.|j.{4})+)e|(h.|j.{4})a)?", re.DOTALL)
_GET = re.compile(rb"h.|j.{4}", re.DOTALL)
_UNRESOLVED = -2


class Skipped:
    """Stands for an object whose bytes were skipped."""


@dataclass(frozen=True, slots=True)
class StackRef:
    """Stands for a list of frames that was skipped."""

    stack: int
    """The number of the stack in Stacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive events, and the bytes that the machine is to skip."""

    events: Events
    size_bytes: int
    num_memoized: int


class EventRuns:
    """Knows the shapes of events, and where events lie in the window."""

    def __init__(self, stacks: Stacks, limits: Limits | None = None) -> None:
        """`limits` None: the usual ones."""
        self._most_events = (limits or Limits()).num_allocations
        self._stacks = stacks
        self._shapes: list[Shape] = []
        self._tried = set[tuple[tuple[int, type], ...]]()
        """The identities of keys and types of values of the events that were offered for learning."""
        self._given_up = False
        self._bytes = b""
        self._window: EventWindow | None = None
        self._stack_of_text: dict[bytes, int] = {}
        self._stack_of_place: dict[int, int] = {}
        self._stack_at: Numbers = np.full(1024, NONE, dtype=np.int32)
        """The number of the stack by the memo's place of its list of frames."""
        self._code_at: dict[int, int] = {}
        """The code of an action by the memo's place of its name."""
        self._num_events = 0

    def moved(self, window: bytes) -> None:
        """React to a new position of the window."""
        self._bytes, self._window = window, None

    def give_up(self) -> None:
        """Read no more events in bulk, because the memo's places are not in order."""
        self._given_up = True

    def learn(self, event: Mapping[Any, object], memo: Mapping[int, object]) -> None:
        """Learn the shape of an event that the machine has built."""
        if self._given_up or len(self._tried) == _MOST_SHAPES:
            return
        looks = tuple((id(key), type(value)) for key, value in event.items())
        if looks in self._tried:
            return
        self._tried.add(looks)
        shape = _shape_of(event, memo)
        if shape and shape not in self._shapes and (not self._shapes or shape.keys[0] == self._shapes[0].keys[0]):
            self._shapes.append(shape)
            self._window = None

    def at(self, position: int, num_memoized: int, memo: Mapping[int, object]) -> Run | None:
        """The run of events that begins at a position of the window; None if there is none."""
        if not self._shapes or self._given_up:
            return None
        if self._window is None:
            self._window = EventWindow(self._bytes, self._shapes)
        found = self._window.find(position)
        if found is None:
            return None
        first, stop = found
        run = self._take(self._window, first, min(stop, first + _MOST_AT_ONCE), num_memoized, memo)
        if run is None:
            self._window.forget(first)
        else:
            self._num_events += len(run.events)
            if self._num_events > self._most_events:
                raise LimitReached(f"it has more than {self._most_events:,} events")
        return run

    def recall(self, place: int) -> StackRef | Skipped:
        """The stand-in for a skipped object of the memo."""
        stack = int(self._stack_at[place]) if place < len(self._stack_at) else NONE
        return Skipped() if stack == NONE else StackRef(stack)

    def _take(
        self, window: EventWindow, first: int, stop: int, num_memoized: int, memo: Mapping[int, object]
    ) -> Run | None:
        """The events first .. stop - 1 as columns, or as many as can be resolved; None if the first cannot."""
        num_new = self._num_resolved_texts(window, first, stop, memo)
        codes = self._codes(window.action[first : first + num_new], memo)
        places = num_memoized + np.cumsum(window.num_memoized[first : first + num_new]) - 1
        stack = self._stack_numbers(window, first, places, memo)
        unresolved = np.flatnonzero((codes == _UNRESOLVED) | (stack == _UNRESOLVED))
        count = int(unresolved[0]) if len(unresolved) else num_new
        if not count:
            return None
        rows = slice(first, first + count)
        return Run(
            events=Events(
                action=codes[:count].astype(np.int8),
                stack=stack[:count],
                **{name: column[rows] for name, column in window.columns.items()},
            ),
            size_bytes=int(window.starts[first + count] - window.starts[first]),
            num_memoized=int(window.num_memoized[rows].sum()),
        )

    def _codes(self, places: Integers, memo: Mapping[int, object]) -> Integers:
        """Codes of the actions whose names are at places of the memo."""
        codes = np.fromiter(map(self._code_at.get, places.tolist(), repeat(_UNRESOLVED)), np.int64, len(places))
        for row in np.flatnonzero(codes == _UNRESOLVED).tolist():
            name = memo.get(int(places[row]))
            if isinstance(name, str):
                codes[row] = self._code_at[int(places[row])] = ACTIONS.index(name) if name in ACTIONS else OTHER
        return codes

    def _num_resolved_texts(self, window: EventWindow, first: int, stop: int, memo: Mapping[int, object]) -> int:
        """The number of events before the first whose list of frames is not understood."""
        begins = window.text_begin[first:stop]
        new = np.flatnonzero(begins != NONE)
        ends = window.starts[first + 1 : stop + 1][new] - 1
        for row, begin, end in zip(new.tolist(), begins[new].tolist(), ends.tolist(), strict=True):
            text = self._bytes[begin:end]
            if text not in self._stack_of_text and not self._understand(text, memo):
                return row
        return stop - first

    def _stack_numbers(self, window: EventWindow, first: int, places: Integers, memo: Mapping[int, object]) -> Numbers:
        """The number of each event's stack, by the memo's place of its list. New lists come first, because
        references to them follow."""
        stop = first + len(places)
        numbers: Numbers = np.full(len(places), NONE, dtype=np.int32)
        begins = window.text_begin[first:stop]
        new = np.flatnonzero(begins != NONE)
        ends = window.starts[first + 1 : stop + 1][new] - 1
        spans = zip(begins[new].tolist(), ends.tolist(), strict=True)
        numbers[new] = [self._stack_of_text[self._bytes[begin:end]] for begin, end in spans]
        while len(places) and len(self._stack_at) <= places[-1]:
            self._stack_at = np.concatenate((self._stack_at, np.full_like(self._stack_at, NONE)))
        self._stack_at[places[new]] = numbers[new]  # the list is the last thing that an event memoizes
        references = window.frames_at[first:stop]
        fetched = np.flatnonzero(references != NONE)
        near = np.minimum(references[fetched], len(self._stack_at) - 1)
        numbers[fetched] = np.where(near == references[fetched], self._stack_at[near], NONE)
        for row in fetched[numbers[fetched] == NONE].tolist():
            numbers[row] = self._stack_built(int(references[row]), memo)
        return numbers

    def _stack_built(self, place: int, memo: Mapping[int, object]) -> int:
        """The number of the stack in a list at a place of the memo that the machine built."""
        number = self._stack_of_place.get(place)
        if number is None:
            number = self._number_of(memo.get(place))
            if number != _UNRESOLVED:
                self._stack_of_place[place] = number
        return number

    def _understand(self, text: bytes, memo: Mapping[int, object]) -> bool:
        """Learn a list of frames from its bytes; returns whether all of its frames are in the memo already."""
        gets = _STACK_TEXT.fullmatch(text)
        if gets is None:
            return False
        number = self._number_of([memo.get(_place(get)) for get in _GET.findall(gets[1] or gets[2] or b"")])
        if number != _UNRESOLVED:  # a list that is not resolved may have frames that come later
            self._stack_of_text[text] = number
        return number != _UNRESOLVED

    def _number_of(self, frames: object) -> int:
        number = self._stacks.number_of(frames) if isinstance(frames, list) else None
        return _UNRESOLVED if number is None else number


def _place(get: bytes) -> int:
    return int.from_bytes(get[1:], "little")


def _shape_of(event: Mapping[Any, object], memo: Mapping[int, object]) -> Shape | None:
    """The shape that the next event with these keys will have; None if such events cannot be read in bulk."""
    if next(iter(event)) != "action" or not all(isinstance(key, str) for key in event):
        return None
    place_of = {id(value): place for place, value in memo.items()}
    places = [place_of.get(id(key)) for key in event]
    kinds = [_kind(key, value) for key, value in event.items()]
    if None in places or "" in kinds or "frames" in kinds[:-1]:
        return None
    gets = (b"h%c" % p if p < 256 else b"j" + p.to_bytes(4, "little") for p in places if p is not None)
    return Shape(tuple(gets), tuple(kinds))


def _kind(key: str, value: object) -> str:
    if key == "action":
        return "action" if isinstance(value, str) else ""
    if key == "frames":
        return "frames" if isinstance(value, (list, StackRef)) else ""
    if key in _COLUMNS:
        return _COLUMNS[key] if type(value) is int else ""
    if isinstance(value, tuple):
        return "pair" if len(value) == 2 and all(type(part) is int for part in value) else ""
    return "scalar" if value is None or isinstance(value, (str, int, float)) else ""
