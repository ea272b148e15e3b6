"""One event of a Kineto trace: the fields that are read, and decoders for them."""

import json
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from steplab.traces.trace import NONE

Number = int | float | str | None
"""The type of numbers in events: some exporters write them as text."""


_Type = TypeVar("_Type")

NO_DIMS = Raw(b"[]")


class Args(Struct, frozen=True, gc=False):
    """The arguments of an event."""

    device: Number = NONE
    stream: Number = NONE
    correlation: Number = NONE
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
    ts: Raw = Raw(b"null")
    """The start, in its written digits."""
    dur: float | int | str | None = None
    pid: Number = None
    tid: Number = None
    args: Args = Args()


class Category(Struct, gc=False):
    """The category of an event, which decodes twice as fast as the whole."""

    cat: str = ""


CATEGORIES = Decoder(list[Category])
EVENTS = Decoder(list[Event])
EVENT = Decoder(Event)
"""What a text may be decoded as."""


def decoded(decoder: Decoder[_Type], text: memoryview | bytes) -> _Type | None:
    """One event or the events of a JSON array; None if it is not valid JSON, or has something that no event should."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def repair_event(text: bytes) -> Event | None:
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
        given = {name: value[name] for name in Event.__struct_fields__ if value.get(name) is not None}
        return EVENT.decode(json.dumps(given, ensure_ascii=False).encode("utf-8", "replace"))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
