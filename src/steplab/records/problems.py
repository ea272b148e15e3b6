"""What may be wrong with a record's values beyond their types; `validation` asks each value inside a record.

A class whose values must agree with each other has a method `problems`, which yields what cannot be right.
"""

from collections.abc import Iterator, Sequence

Problem = tuple[str, str]
"""Path of a field within the checked value, such as '.device_s[3]', and what is wrong with it."""


def known(path: str, value: str, names: Sequence[str] | set[str]) -> Iterator[Problem]:
    """A value that is not one of the known names."""
    if value not in names:
        yield path, f"'{value[:64]}' is not known; it must be one of {', '.join(sorted(names))}"


def as_long(path: str, column: Sequence[object], length: int, other: str) -> Iterator[Problem]:
    """A column whose length is not that of another."""
    if len(column) != length:
        yield path, f"has {len(column)} entries, but {other} has {length}"


def numbered(path: str, numbers: Sequence[int], expected: int | None = None) -> Iterator[Problem]:
    """Numbers of ranks that are not complete and in order."""
    if list(numbers) != list(range(len(numbers))):
        yield path, f"must be ranks 0 to {len(numbers) - 1} in order, not {', '.join(map(str, numbers[:8]))}"
    elif numbers and expected is not None and len(numbers) != expected:
        yield path, f"has {len(numbers)} ranks, but {expected} took part"
