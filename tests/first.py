from collections.abc import Iterable
from typing import Any

import pytest


def first(number: int, values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, of which those after the first `number` are tried by `make release` alone."""
    return [pytest.param(value, marks=[pytest.mark.release] * (at >= number)) for at, value in enumerate(values)]
