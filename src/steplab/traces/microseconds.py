"""Kineto's times, microseconds in decimal, as whole nanoseconds.

Starts are read digit by digit, as they are written: as a double 4458676522690.655 times 1000 comes out one off in every
fourth case, and 1712195495505582.988, as torch 2.2 and 2.3 write it, which count from 1970, is rounded by up to 125 ns.
"""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

Integers = NDArray[np.int64]

MISSING = int(np.iinfo(np.int64).min)
"""The value, among nanoseconds, for a time that is absent or does not fit."""

_COMMA, _DOT = b","[0], b"."[0]
_IN_PLAIN_NUMBERS = np.zeros(256, dtype=bool)
_IN_PLAIN_NUMBERS[list(b"0123456789-.,")] = True
_LONGEST = len("9007199254740991.999")
_MOST_US = 2**53
"""285 years: with three decimals still an int64 of nanoseconds."""


def start_nanoseconds(times_us: Sequence[Raw]) -> Integers:
    """Nanoseconds of the numbers in JSON text, exact as far as they are whole; MISSING for anything else."""
    text = b",".join(times_us)
    characters = np.frombuffer(text, dtype=np.uint8)
    ends = np.append(np.flatnonzero(characters == _COMMA), len(characters))
    dots = np.flatnonzero(characters == _DOT)
    longest = np.max(np.diff(ends, prepend=-1)) - 1
    if not text or longest > _LONGEST or not np.all(_IN_PLAIN_NUMBERS[characters]):
        return _one_by_one(times_us)
    owner = np.searchsorted(ends, dots)
    num_decimals = np.zeros(len(ends), dtype=np.int64)
    num_decimals[owner] = ends[owner] - dots - 1
    if longest == _LONGEST and np.any(num_decimals > 3):
        return _one_by_one(times_us)
    digits = np.fromstring(text.replace(b".", b""), dtype=np.int64, sep=",")
    fits = np.abs(digits) // 10**num_decimals < _MOST_US
    if np.any(num_decimals != 3):
        digits = digits * 10 ** np.maximum(3 - num_decimals, 0) // 10 ** np.maximum(num_decimals - 3, 0)
    return np.where(fits, digits, MISSING)


def duration_nanoseconds(times_us: Sequence[float | int | str | None]) -> Integers:
    """Nanoseconds of each duration, MISSING for none; a double holds a duration under a day exactly."""
    try:
        us = np.fromiter(times_us, np.float64, len(times_us))
    except (TypeError, ValueError):
        return np.array([_exact(str(time_us)) for time_us in times_us], dtype=np.int64)
    usable = np.abs(us) < _MOST_US
    if usable.all():
        return np.rint(us * 1000).astype(np.int64)
    return np.where(usable, np.rint(np.where(usable, us, 0) * 1000).astype(np.int64), MISSING)


def _one_by_one(times_us: Sequence[Raw]) -> Integers:
    texts = (bytes(time_us).decode("utf-8", "replace").strip('"') for time_us in times_us)
    return np.array([_exact(text) for text in texts], dtype=np.int64)


def _exact(text: str) -> int:
    try:
        value = Decimal(text)
    except InvalidOperation:
        return MISSING
    if not value.is_finite() or abs(value) >= _MOST_US:
        return MISSING
    return int(value * 1000)
