"""The help of a command, from the docstring of its file."""

import tokenize
from ast import literal_eval
from inspect import cleandoc
from pathlib import Path


def docstring_of(file: Path) -> str:
    """The docstring at the beginning of a Python file, which is not imported."""
    with tokenize.open(file) as lines:
        text: str = literal_eval(next(tokenize.generate_tokens(lines.readline)).string)
    return text


def unwrapped(docstring: str) -> str:
    """The paragraphs of a docstring, each on one line."""
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in cleandoc(docstring).split("\n\n"))
