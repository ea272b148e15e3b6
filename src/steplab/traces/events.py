"""One event of a Kineto trace: the fields that are read, and decoders for them."""

import json

import msgspec
from msgspec import Raw, Struct, field

from steplab.traces.trace import NONE

Number = int | float | str | None
"""The type of numbers in events: some exporters write them as text."""


NO_DIMS = Raw(b"[]")


class Args(Struct, frozen=True, gc=False):
    """The arguments of an event."""

    device: Number = NONE
    stream: Number = NONE
    correlation: Number = NONE
    size_bytes: Number = field(default=NONE, name="bytes")
    sequence: Number = field(default=NONE, name="Sequence number")
    dims: Raw = field(default=NO_DIMS, name="Input Dims")
    """The text as it is written: one operator is called a thousand times with the same."""
    types: Raw = field(default=Raw(b"[]"), name="Input type")
    concrete: Raw = field(default=Raw(b"[]"), name="Concrete Inputs")
    """Numbers and flags, as text."""


class Event(Struct, frozen=True, gc=False):
    """The fields that are read of an event of any category."""

    cat: str = ""
    name: str = ""
    ts: float | int | str | None = None
    dur: float | int | str | None = None
    pid: Number = None
    tid: Number = None
    args: Args = Args()


class ExactEvent(Struct, frozen=True, gc=False):
    """An event whose start keeps its written digits."""

    cat: str = ""
    name: str = ""
    ts: Raw = Raw(b"null")
    dur: float | int | str | None = None
    pid: Number = None
    tid: Number = None
    args: Args = Args()


class _Category(Struct, gc=False):
    cat: str = ""


AnyEvent = Event | ExactEvent

_EVENTS = msgspec.json.Decoder(list[Event])
_EXACT_EVENTS = msgspec.json.Decoder(list[ExactEvent])
_CATEGORIES = msgspec.json.Decoder(list[_Category])
_EXACT_EVENT = msgspec.json.Decoder(ExactEvent)


def decode_categories(array: memoryview) -> list[str] | None:
    """The category of each event, which decodes twice as fast as whole events."""
    try:
        return [event.cat for event in _CATEGORIES.decode(array)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decode_events(array: memoryview) -> list[Event] | None:
    """The events of a JSON array; None if it is not valid JSON, or contains something that no event should."""
    try:
        return _EVENTS.decode(array)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decode_exact_events(array: memoryview) -> list[ExactEvent] | None:
    """The events of a JSON array, with their starts as written; None as for `decode_events`."""
    try:
        return _EXACT_EVENTS.decode(array)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decode_exact_event(text: bytes) -> ExactEvent | None:
    """One event; None as for `decode_events`."""
    try:
        return _EXACT_EVENT.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def repair_event(text: bytes) -> ExactEvent | None:
    """An event that the decoder refused; None if it cannot be read as a JSON object, or a field has a wrong type.

    NaN, Infinity and null count as absent; control characters, halves of surrogate pairs and bad UTF-8 in strings are
    replaced.
    """
    try:
        value = json.loads(
            text.decode("utf-8", "replace"), strict=False, parse_float=str, parse_constant=lambda constant: None
        )
        if not isinstance(value, dict):
            return None
        given = {name: value[name] for name in ExactEvent.__struct_fields__ if value.get(name) is not None}
        return _EXACT_EVENT.decode(json.dumps(given, ensure_ascii=False).encode("utf-8", "replace"))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
