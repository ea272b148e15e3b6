"""Choose and sort the rows of stored records, for lists."""

import heapq
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.errors import UserError, meant
from steplab.lab.keeping import open_store
from steplab.records.registry import KINDS_IN_LISTS
from steplab.records.rows import Row, Scalar
from steplab.units import counted, parse_duration, parse_size

STUDY = "study"

_OPERATORS: dict[str, Callable[[str | float, str | float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "~": lambda value, part: str(part).lower() in str(value).lower(),
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_FIELD = re.compile(r"[\w.-]+")
_CONDITION = re.compile(r"\s*([\w.-]+)\s*(" + "|".join(map(re.escape, _OPERATORS)) + r")\s*(?![=<>!~])(.+?)\s*")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Listing:
    rows: tuple[Row, ...]
    num_left_out: int
    unknown: tuple[tuple[str, str], ...]
    """Id and kind of records of kinds unknown to this version."""

    def __repr__(self) -> str:
        left_out = f", {self.num_left_out} left out" if self.num_left_out else ""
        return f"<{type(self).__name__}: {counted(len(self.rows), 'row')}{left_out}; `rows` are dicts, also for pandas>"


def list_records(
    *,
    store: Path | str | None = None,
    kinds: Sequence[str] = (),
    study: str | None = None,
    name: str | None = None,
    where: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
) -> Listing:
    """Matching rows; newest first unless `sort` names a field.

    `kinds`: values of the field `kind`, or `study` alone. `where`: conditions joined by 'and', such as "model=small and
    step_time_s<50ms"; operators are = != < <= > >= and ~ (contains). `sort`: a field, with ':desc' for the largest
    first.

    Raises UserError for an invalid kind, field or condition.
    """
    for kind in kinds:
        if kind not in (*KINDS_IN_LISTS, STUDY):
            raise UserError(f"kind '{kind}' is not known; choose one of {', '.join((*KINDS_IN_LISTS, STUDY))}")
    if STUDY in kinds and len(kinds) > 1:
        raise UserError("studies are listed by themselves; give --kind study alone")
    conditions = _conditions(where) if where else []
    sort_key, descending = _order(sort) if sort else (None, False)
    keys = [key for key, _ in conditions] + ([sort_key] if sort_key else [])
    fields_seen, num_found = dict[str, None](), 0

    def matching(rows: Iterable[Row]) -> Iterator[Row]:
        nonlocal num_found
        for row in rows:
            if not kinds or STUDY in kinds or row["kind"] in kinds:
                fields_seen.update(dict.fromkeys(row))
                if all(holds(row) for _, holds in conditions):
                    num_found += 1
                    yield row

    with open_store(store, write=False) as opened:
        study_id = opened.study_id(study) if study else None
        rows = opened.studies() if STUDY in kinds else opened.each_row(study=study_id, name=name)
        found = matching(rows)
        if limit is not None and not keys and not kinds:
            found = itertools.islice(found, limit + 1)
        shown = _first(found, sort_key, descending, limit)
        if fields_seen and (lacking := set(keys) - fields_seen.keys()):
            raise _no_field(min(lacking), fields_seen)
        unknown = opened.of_unknown_kind()
    return Listing(rows=tuple(shown), num_left_out=num_found - len(shown), unknown=tuple(unknown))


def checked_keys(text: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """From a list with commas. Raises UserError for an unknown field."""
    known, keys = dict.fromkeys(key for row in rows for key in row), [_key(part.strip()) for part in text.split(",")]
    for key in keys if rows else ():
        if key not in known:
            raise _no_field(key, known)
    return tuple(keys)


def _key(given: str) -> str:
    return given.replace("-", "_")


def _no_field(name: str, known: Mapping[str, object]) -> UserError:
    return UserError(f"no field '{name}'; {meant(name, known)}")


_Condition = tuple[str, Callable[[Row], bool]]
"""A field, and whether a row meets the condition on it."""


def _conditions(where: str) -> list[_Condition]:
    parts = re.split(r"\s+and(?:\s+|$)|\s*,\s*", where.strip())
    if len(parts) > 1 and "" in parts:
        raise UserError(f"'{where}' lacks a condition at an 'and' or a comma; write model=small and context>=512")
    return [_condition(part) for part in parts]


def _condition(text: str) -> _Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UserError(
            f"'{text}' is not a condition; write it as model=small, step_time_s<50ms or device~H200, joined by 'and'"
        )
    key, compare, wanted = _key(match[1]), _OPERATORS[match[2]], match[3].strip("'\"")

    def holds(row: Row) -> bool:
        value = row.get(key)
        if value is None:
            return False
        if match[2] == "~" or isinstance(value, str):
            return compare(value, wanted)
        return compare(value, _number(key, wanted))

    return key, holds


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass  # with a unit, below
    if key.endswith("_bytes"):
        return float(parse_size(text))
    if key.endswith("_s"):
        return parse_duration(text)
    raise UserError(f"{key} is compared with a number, not with '{text}'")


def _order(sort: str) -> tuple[str, bool]:
    name, _, order = sort.partition(":")
    if order not in ("", "asc", "desc") or not _FIELD.fullmatch(name):
        raise UserError(f"--sort takes FIELD, FIELD:asc or FIELD:desc, not '{sort}'")
    return _key(name), order == "desc"


def _first(rows: Iterable[Row], key: str | None, descending: bool, limit: int | None) -> list[Row]:
    def place(row: Row) -> tuple[bool, bool, Scalar]:
        value = row.get(key) if key else 0
        return (value is None) != descending, isinstance(value, str), 0 if value is None else value

    if limit is None:
        return sorted(rows, key=place, reverse=descending)
    return (heapq.nlargest if descending else heapq.nsmallest)(limit, rows, key=place)
