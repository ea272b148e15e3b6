"""Fields that are read from a Kineto event, and their decoders."""

import json
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw, Struct, field
from msgspec.json import Decoder
from numpy.typing import NDArray

from steplab.reading.traces.trace import NONE

Number = int | float | str | None
"""Number in an event; some exporters write text."""


_Type = TypeVar("_Type")

NO_DIMS = Raw(b"[]")


class Args(Struct, frozen=True, gc=False):
    device: Number = NONE
    stream: Number = NONE
    correlation: Number = NONE
    sequence: Number = field(default=NONE, name="Sequence number")
    dims: Raw = field(default=NO_DIMS, name="Input Dims")
    """Raw JSON; operators repeat the same text thousands of times."""
    types: Raw = field(default=Raw(b"[]"), name="Input type")
    concrete: Raw = field(default=Raw(b"[]"), name="Concrete Inputs")
    """Numbers and flags among the inputs, as text."""
    collective: Any = field(default="", name="Collective name")
    group: Any = field(default="", name="Process Group Name")
    members: Any = field(default="", name="Process Group Ranks")
    num_in: Any = field(default=0, name="In msg nelems")
    num_out: Any = field(default=0, name="Out msg nelems")
    dtype: Any = ""


class Event(Struct, frozen=True, gc=False):
    cat: str = ""
    name: str = ""
    ts: Raw = Raw(b"null")
    """Start in microseconds, as written."""
    dur: Raw = Raw(b"null")
    pid: Number = None
    tid: Number = None
    args: Args = Args()


EVENTS = Decoder(list[Event])
EVENT = Decoder(Event)


def decoded(decoder: Decoder[_Type], text: memoryview | bytes) -> _Type | None:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def repair_event(text: bytes) -> Event | None:
    """Convert an event that the decoder refused; None if it is no JSON object or a field has a wrong type. NaN,
    Infinity and null count as absent. Control characters, half surrogate pairs and bad UTF-8 are replaced.
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


MISSING = int(np.iinfo(np.int64).min)
"""Nanoseconds that stand for an absent or too large time."""
_MOST_US = 2**53
"""285 years in microseconds; as int64 nanoseconds this does not overflow."""


def nanoseconds(times_us: Sequence[Raw]) -> NDArray[np.int64]:
    """Nanoseconds from microseconds in JSON, numbers or text; MISSING for anything else.

    Computed in x86's long double: with 53 bits of mantissa, 4458676522690.655 times 1000 is often one off, and times
    since 1970, from torch 2.2 and 2.3, up to 125 ns. Machines without long double have these errors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            us = np.fromstring(b",".join(times_us), dtype=np.longdouble, sep=",")
        except (DeprecationWarning, ValueError):  # some are not numbers
            us = np.array([_number(time_us) for time_us in times_us], dtype=np.longdouble)
    usable = np.abs(us) < _MOST_US
    return np.where(usable, np.rint(np.where(usable, us, 0) * 1000).astype(np.int64), MISSING)


def _number(text: Raw) -> np.longdouble:
    try:
        return np.longdouble(bytes(text).decode("utf-8", "replace").strip('"'))
    except ValueError:
        return np.longdouble("nan")
