"""A pickle machine that builds containers and scalars, and nothing else.

A pickle is a program: `pickle.loads` runs it, and it may import and call anything. This machine has no instruction that
imports, calls or subclasses; if one occurs, it stops and reports it. It also limits what Python's own does not: the
claimed length of a string, the places of the memo, the objects that it keeps.

The instructions are those of protocols 2 to 5 (PEP 307, PEP 3154, PEP 574; Lib/pickletools.py documents each). Long
lists of events do not pass through here one by one: see event_runs.
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from steplab.limits import LimitReached, Limits
from steplab.snapshots.event_runs import EventRuns
from steplab.snapshots.refusal import Refused
from steplab.snapshots.window import Window
from steplab.units import MIB, format_bytes

LONGEST_TEXT_BYTES = MIB
"""The longest text; names, paths and settings are far shorter."""
LONGEST_INT_BYTES = 255
DEEPEST = 64
"""The deepest nesting of containers; a snapshot has 7."""
MOST_ON_STACK = 1 << 20
"""The most objects on the stack. Python's pickle writes a thousand before an instruction takes them, torch's own all
events at once: as dicts so many would need more memory than is allowed."""

_CONTAINER_BYTES, _MEMO_BYTES, _ITEM_BYTES, _NUMBER_BYTES, _TEXT_BYTES = 100, 128, 16, 40, 64
_DAMAGED = "it is no whole pickle: it is damaged, or ends early"
_NO_SNAPSHOT = "which no memory snapshot does: refused"

_REFUSED = {
    b"c": "import something",  # _global gives more details
    b"\x93": "import something",
    b"i": "import something",
    b"\x82": "take a class out of the extension registry",
    b"\x83": "take a class out of the extension registry",
    b"\x84": "take a class out of the extension registry",
    b"R": "call something",
    b"\x81": "make an object",
    b"\x92": "make an object",
    b"o": "make an object",
    b"b": "set an object's state",
    b"P": "load an object from elsewhere (a persistent id)",
    b"Q": "load an object from elsewhere (a persistent id)",
    b"\x96": "make a bytearray",
    b"\x97": "take a buffer from elsewhere",
    b"\x98": "take a buffer from elsewhere",
    b"\x8f": "make a set",
    b"\x90": "make a set",
    b"\x91": "make a frozenset",
}


class PickleMachine:
    """Runs the pickle that begins in the window; `runs` reads events in bulk."""

    def __init__(self, window: Window, runs: EventRuns, limits: Limits | None = None) -> None:
        """`limits` None: the usual ones."""
        self._window, self._runs, self._limits = window, runs, limits or Limits()
        self._stack: list[object] = []
        self._marked: list[list[object]] = []
        """The stacks below the marks."""
        self._num_below = 0
        """The number of objects in them."""
        self._memo: dict[int, object] = {}
        self._num_memoized = 0
        self._object_bytes = 0
        self._instructions = self._table()
        self._look()

    def run(self) -> object:
        """The object that the pickle builds. Raises Refused if the pickle asks for anything else."""
        instructions = self._instructions
        try:
            for _ in range(self._limits.num_instructions):
                if self._position > self._move_at:
                    self._move()
                code = self._bytes[self._position]
                self._position += 1
                if code == 0x2E:  # STOP
                    return self._stack.pop()
                instructions[code]()
            raise LimitReached(f"its pickle has more than {self._limits.num_instructions:,} instructions")
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            raise Refused(_DAMAGED) from error

    def _table(self) -> list[Callable[[], object]]:
        """The method for each opcode; what one returns is not used."""
        known: dict[bytes, Callable[[], object]] = {
            b"\x80": self._proto,
            b"\x95": lambda: self._take(8),  # FRAME: the number of bytes to read ahead
            b"N": lambda: self._push(None, _ITEM_BYTES),
            b"\x88": lambda: self._push(True, _ITEM_BYTES),
            b"\x89": lambda: self._push(False, _ITEM_BYTES),
            b"K": lambda: self._push(self._number(1), _ITEM_BYTES),
            b"M": lambda: self._push(self._number(2), _NUMBER_BYTES),
            b"J": lambda: self._push(self._number(4, signed=True), _NUMBER_BYTES),
            b"\x8a": lambda: self._long(1),
            b"\x8b": lambda: self._long(4),
            b"G": lambda: self._push(struct.unpack(">d", self._take(8))[0], _NUMBER_BYTES),
            b"\x8c": lambda: self._text(1),
            b"X": lambda: self._text(4),
            b"\x8d": lambda: self._text(8),
            b"C": lambda: self._raw(1),
            b"B": lambda: self._raw(4),
            b"\x8e": lambda: self._raw(8),
            b"]": lambda: self._push([], _CONTAINER_BYTES),
            b"}": self._empty_dict,
            b")": lambda: self._push((), _ITEM_BYTES),
            b"\x85": lambda: self._tuple_of(1),
            b"\x86": lambda: self._tuple_of(2),
            b"\x87": lambda: self._tuple_of(3),
            b"t": lambda: self._push(tuple(self._pop_mark()), _CONTAINER_BYTES),
            b"(": self._mark,
            b"a": lambda: self._extend([self._stack.pop()]),
            b"e": lambda: self._extend(self._pop_mark()),
            b"s": lambda: self._update([self._stack.pop(-2), self._stack.pop()]),
            b"u": lambda: self._update(self._pop_mark()),
            b"0": lambda: self._stack.pop(),
            b"1": lambda: self._pop_mark().clear(),
            b"\x94": lambda: self._memoize(self._num_memoized),
            b"q": lambda: self._memoize_at(self._number(1)),
            b"r": lambda: self._memoize_at(self._number(4)),
            b"h": lambda: self._recall(self._number(1)),
            b"j": lambda: self._recall(self._number(4)),
        }
        known |= {code: partial(self._refuse, code) for code in _REFUSED}
        return [known.get(bytes([code])) or partial(self._unknown, code) for code in range(256)]

    # --- bytes ------------------------------------------------------------------------------------------------

    def _move(self) -> None:
        """Move the window so that the longest instruction lies within it."""
        self._window.move(self._position)
        self._look()

    def _look(self) -> None:
        """Start at the left of the window."""
        self._bytes, self._position = self._window.bytes, 0
        self._runs.moved(self._bytes)
        reach = LONGEST_TEXT_BYTES + 16
        self._move_at = len(self._bytes) if self._window.ended else len(self._bytes) - reach

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._bytes):
            raise Refused(_DAMAGED)
        taken = self._bytes[self._position : end]
        self._position = end
        return taken

    def _number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def _counted(self, width: int, most: int, what: str) -> bytes:
        size = self._number(width)
        if size > most:
            raise Refused(f"the pickle holds {what} of {format_bytes(size)}, {_NO_SNAPSHOT}")
        return self._take(size)

    # --- scalars ----------------------------------------------------------------------------------------------

    def _push(self, value: object, size_bytes: int) -> None:
        self._stack.append(value)
        if self._num_below + len(self._stack) > MOST_ON_STACK:
            raise Refused(f"the pickle has more than {MOST_ON_STACK} objects waiting on its stack, {_NO_SNAPSHOT}")
        self._count(size_bytes)

    def _count(self, size_bytes: int) -> None:
        """Count memory for new objects. Raises Refused above the limit."""
        self._object_bytes += size_bytes
        if self._object_bytes > self._limits.object_bytes:
            raise LimitReached(
                f"its objects would take more than {format_bytes(self._limits.object_bytes)} of memory (events as "
                "torch writes them, in pickle protocol 4 or 5, would not)"
            )

    def _long(self, width: int) -> None:
        number = int.from_bytes(self._counted(width, LONGEST_INT_BYTES, "a number"), "little", signed=True)
        self._push(number, _NUMBER_BYTES)

    def _text(self, width: int) -> None:
        text = self._counted(width, LONGEST_TEXT_BYTES, "a text")
        self._push(str(text, "utf-8", "surrogatepass"), _TEXT_BYTES + 4 * len(text))

    def _raw(self, width: int) -> None:
        raw = self._counted(width, LONGEST_TEXT_BYTES, "a string of bytes")
        self._push(raw, _TEXT_BYTES + len(raw))

    # --- containers -------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        if len(self._marked) >= DEEPEST:
            raise Refused(f"the pickle nests deeper than {DEEPEST}, {_NO_SNAPSHOT}")
        self._marked.append(self._stack)
        self._num_below += len(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[object]:
        items = self._stack
        self._stack = self._marked.pop()
        self._num_below -= len(self._stack)
        return items

    def _tuple_of(self, size: int) -> None:
        items = tuple(self._stack.pop() for _ in range(size))
        self._push(items[::-1], _CONTAINER_BYTES)

    def _empty_dict(self) -> None:
        begin = self._position - 1
        run = self._runs.at(begin, self._num_memoized, self._memo)
        if run is None:
            self._push({}, _CONTAINER_BYTES)
            return
        self._stack.append(run.events)
        self._position += run.size_bytes - 1
        self._num_memoized += run.num_memoized

    def _extend(self, items: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise Refused(_DAMAGED)
        target.extend(items)
        self._count(_ITEM_BYTES * len(items))

    def _update(self, items: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise Refused(_DAMAGED)
        for key in items[::2]:
            if type(key) is not str and not _is_key(key):
                raise Refused(f"the pickle holds a dict with a {type(key).__name__} for a key, {_NO_SNAPSHOT}")
        target.update(zip(items[::2], items[1::2], strict=True))
        self._count(_CONTAINER_BYTES * len(items))
        if "action" in target:
            self._runs.learn(target, self._memo)

    # --- memo -------------------------------------------------------------------------------------------------

    def _memoize(self, place: int) -> None:
        if place not in self._memo:
            self._num_memoized += 1
        self._memo[place] = self._stack[-1]
        self._count(_MEMO_BYTES)

    def _memoize_at(self, place: int) -> None:
        self._runs.give_up()  # they rely on places in ascending order
        self._memoize(place)

    def _recall(self, place: int) -> None:
        try:
            value = self._memo[place]
        except KeyError:
            if place >= self._num_memoized:
                raise Refused(_DAMAGED) from None
            value = self._runs.recall(place)
        self._push(value, _ITEM_BYTES)

    # --- refused instructions ---------------------------------------------------------------------------------

    def _proto(self) -> None:
        protocol = self._number(1)
        if not 2 <= protocol <= 5:
            raise Refused(f"it is a pickle of protocol {protocol}; steplab reads 2 to 5")

    def _refuse(self, code: bytes) -> NoReturn:
        what = _REFUSED[code]
        if what == "import something":
            what = f"import {self._imported(code)}"
        raise Refused(f"the pickle wants to {what}, {_NO_SNAPSHOT}")

    def _imported(self, code: bytes) -> str:
        if code == b"\x93":
            names = [name[:100] for name in self._stack[-2:] if isinstance(name, str)]
        else:
            lines = self._bytes[self._position : self._position + 200].split(b"\n")[:2]
            names = [line.decode("utf-8", "replace") for line in lines]
        return ".".join(name if name.isprintable() else ascii(name) for name in names)

    def _unknown(self, code: int) -> NoReturn:
        raise Refused(f"its byte {code:#04x} is no instruction of pickle protocols 2 to 5: it is damaged, or no pickle")


def _is_key(key: object) -> bool:
    """Whether a key can be hashed quickly and without recursion."""
    if type(key) is tuple:
        return all(type(part) in _SCALARS for part in key)
    return type(key) in _SCALARS


_SCALARS = (str, int, float, bool, bytes, type(None))
