"""Docstrings as help: their lines are as long as the source's, and a terminal's are not."""

from inspect import cleandoc

_SOURCE_WIDTH = 120 - 4
"""Of a line of source, less the indentation of a docstring."""


def unwrapped(docstring: str | None) -> str:
    """The text with those line breaks taken out that only the width of the source asked for; examples keep theirs."""
    lines: list[str] = []
    before = 0  # length of the line before, as it is in the source
    for line in cleandoc(docstring or "").splitlines():
        first_word = line.split(" ")[0]
        if lines and first_word and before and before + 1 + len(first_word) > _SOURCE_WIDTH:
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        before = len(line)
    return "\n".join(lines)
