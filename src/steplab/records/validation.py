"""Checks of imported records beyond their types.

Columns of different lengths or absurd numbers would fail in a later report; `check` refuses them and names the field.
Rules for all fields (finite, not absurd, one line of text) have exceptions by name; rules between fields are the
classes' `problems`.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from types import NoneType
from typing import Any

from steplab.errors import SteplabError
from steplab.printing import STEERING, plain
from steplab.records.record import Problem, Record

LARGEST = 1e18
"""Largest time, count or size accepted: thirty billion years, or an exabyte."""
LARGEST_FLOPS = 1e30
LONGEST_NAME = 255
"""Most characters in a record's name."""

_OF_TENSORS = frozenset(
    {"loss", "reference_loss", "largest", "smallest", "largest_gradient", "suggested_scale", "number", "addend_value",
     "result", "start", "spacing", "added"}
)  # fmt: skip
_SIGNED = frozenset(
    {"worst_relative", "worst_fit", "alpha_s", "beta_s_per_byte", "gamma_s_per_rank", "call_s", "lead_s", "stream",
     "gradient_exponents", "temperature_c", "outside_bytes", "predicted_share", "untried_shares"}
)  # fmt: skip
"""Fields that may be negative: fits, differences, savings, exponents, and an unknown stream (-1)."""
_AS_GIVEN = frozenset({"hf_config"})
"""Fields with a user's content, which is neither checked nor shown."""

_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def check(record: Record) -> None:
    shown = record.id if _ID.fullmatch(record.id) else ascii(record.id[:64])
    problem = first_problem(record)
    if problem is not None:
        raise SteplabError(f"record {shown}: {problem}")


def first_problem(value: Any) -> str | None:
    found = next(_problems(value, ""), None)
    return None if found is None else " ".join((found[0].removeprefix("."), found[1])).strip()


def cleaned(value: Any) -> Any:
    """Copy with each text in one line, without control characters."""
    if isinstance(value, str):
        return value if not STEERING.search(value) else plain(value).replace("\n", "\\n")
    if isinstance(value, (int, float, NoneType)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in _checked_fields(type(value)):
            if field.init and (new := cleaned(content := getattr(value, field.name))) is not content:
                changed[field.name] = new
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        return {cleaned(key): cleaned(content) for key, content in value.items()}
    if isinstance(value, tuple):
        items = tuple(map(cleaned, value))
        return value if all(map(operator.is_, items, value)) else items
    return value


def _problems(value: Any, name: str) -> Iterator[Problem]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in _checked_fields(type(value)):
            content = getattr(value, field.name)
            if not _is_plain(content):
                yield from _within(f".{field.name}", _problems(content, field.name))
            if field.name == "schema" and content != field.default:
                yield ".schema", f"must be {field.default}"
        if hasattr(value, "problems"):
            yield from value.problems()
    elif isinstance(value, str):
        yield from _text_problems(value, name)
    elif isinstance(value, (int, float)):
        yield from _number_problems(value, name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _within(f"[{ascii(key)[:80]}]", (*_problems(key, ""), *_problems(item, name)))
    elif isinstance(value, Sequence) and not _are_plain_counts(value):
        for index, item in enumerate(value):
            if not _is_plain(item):
                yield from _within(f"[{index}]", _problems(item, name))


@cache
def _checked_fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(field for field in dataclasses.fields(cls) if field.name not in _AS_GIVEN)


def _is_plain(value: Any) -> bool:
    return value is None or (type(value) in (bool, int, float) and 0 <= value < LARGEST)


def _are_plain_counts(values: Sequence[Any]) -> bool:
    if not values or not set(map(type, values)) <= {int, float}:
        return False
    total = sum(values)  # NaN if any is NaN
    return bool(min(values) >= 0 and total < LARGEST)


def _text_problems(text: str, name: str) -> Iterator[Problem]:
    if name == "id" and not _ID.fullmatch(text):
        yield "", f"must be up to 64 letters, digits, '-' and '_', not {text[:64]!a}"
    if name == "created_utc" and not _is_time(text):
        yield "", f"must be a time such as 2026-11-21T07:30:00Z, not {text[:64]!a}"
    if found := STEERING.search(text):
        yield "", f"has the control character {found[0]!a} at position {found.start()}"


def _is_time(text: str) -> bool:
    try:
        return bool(_TIME.fullmatch(text) and datetime.fromisoformat(text))
    except ValueError:
        return False


def _number_problems(number: float, name: str) -> Iterator[Problem]:
    if isinstance(number, float) and not math.isfinite(number):
        yield "", f"must be a finite number, not {number}"
    elif name not in _OF_TENSORS:
        most = LARGEST_FLOPS if "flops" in name else LARGEST
        if abs(number) >= most:
            yield "", f"must be below {most:.0e}, not {_short(number)}"
        elif number < 0 and name not in _SIGNED:
            yield "", f"must not be negative, but is {_short(number)}"


def _short(number: float) -> str:
    return f"{number:.6g}" if isinstance(number, float) else str(number) if abs(number) < 10**24 else "a longer number"


def _within(path: str, problems: Iterator[Problem] | Sequence[Problem]) -> Iterator[Problem]:
    return ((path + inner, why) for inner, why in problems)
