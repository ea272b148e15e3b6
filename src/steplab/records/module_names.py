"""The names that records give to the modules of a model: blocks.3.attention."""

import re

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def without_numbers(module: str) -> str:
    """A module's name with * for the numbers of layers: blocks.3.attention -> blocks.*.attention."""
    return _NUMBER.sub("*", module)
