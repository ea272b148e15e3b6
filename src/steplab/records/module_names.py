"""Module names in records, such as blocks.3.attention."""

import re

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def without_numbers(module: str) -> str:
    """Replace layer numbers by *: blocks.3.attention -> blocks.*.attention."""
    return _NUMBER.sub("*", module)
