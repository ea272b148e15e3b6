from typing import TypeVar

Value = TypeVar("Value")


def sure(value: Value | None) -> Value:
    """The value, for type checkers too; a failure where it is None."""
    assert value is not None
    return value
