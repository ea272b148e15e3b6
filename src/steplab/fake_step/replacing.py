from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give a module or an object other attributes, and restore its own afterwards."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, each in attributes.items():
        setattr(owner, name, each)
    try:
        yield
    finally:
        for name, each in before.items():
            setattr(owner, name, each)
