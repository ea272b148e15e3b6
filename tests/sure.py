from typing import TypeVar

Value = TypeVar("Value")


def sure(value: Value | None) -> Value:
    assert value is not None
    return value
