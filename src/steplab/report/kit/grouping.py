from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    found: dict[_Key, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def told_once(remarks: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """List the subjects of each distinct text; remarks are (subject, text)."""
    return {told: [about for about, _ in pairs] for told, pairs in grouped(remarks, lambda pair: pair[1]).items()}


def spread(items: Sequence[_Item], most: int) -> list[_Item]:
    """Choose at most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
