"""Help texts made from docstrings, without the line breaks that belong to the source's width."""

from inspect import cleandoc

_SOURCE_WIDTH = 120 - 4
"""Length of a line of source, less the indentation of a docstring."""


def unwrapped(docstring: str | None) -> str:
    """The text without the line breaks that are due to the width of the source alone; those of examples stay."""
    lines: list[str] = []
    before = 0  # length of the previous line in the source
    for line in cleandoc(docstring or "").splitlines():
        first_word = line.split(" ")[0]
        if lines and first_word and before and before + 1 + len(first_word) > _SOURCE_WIDTH:
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        before = len(line)
    return "\n".join(lines)
