"""Problems of a record's values beyond their types.

A class with values that must agree has a method `problems` that yields violations; `validation` calls it for each value
in a record.
"""

from collections.abc import Iterator, Sequence

Problem = tuple[str, str]
"""Path within the checked value, such as '.device_s[3]', and the fault."""


def known(path: str, value: str, names: Sequence[str] | set[str]) -> Iterator[Problem]:
    """Yield a problem for an unknown name."""
    if value not in names:
        yield path, f"'{value[:64]}' is unknown; it must be one of {', '.join(sorted(names))}"


def as_long(path: str, column: Sequence[object], length: int, other: str) -> Iterator[Problem]:
    """Yield a problem for a column of the wrong length."""
    if len(column) != length:
        yield path, f"has {len(column)} entries, but {other} has {length}"


def numbered(path: str, numbers: Sequence[int], expected: int | None = None) -> Iterator[Problem]:
    """Yield a problem for rank numbers that are incomplete or out of order."""
    if list(numbers) != list(range(len(numbers))):
        yield path, f"must be ranks 0 to {len(numbers) - 1} in order, not {', '.join(map(str, numbers[:8]))}"
    elif numbers and expected is not None and len(numbers) != expected:
        yield path, f"has {len(numbers)} ranks, but {expected} took part"
