"""Source lines and modules' names cut from the left, so that what tells them apart stays."""

CUT = "…"
"""In place of what was cut."""


def short_line(source: str, most: int) -> str:
    """A source line in at most so many letters: without the outer folders, then without the function, then cut at the
    left. 'steplab/model/transformer.py:81 in forward' -> '…/transformer.py:81 in forward' -> 'transformer.py:81'."""
    place, word, function = source.partition(" in ")
    folders = place.split("/")
    shorter = [f"{CUT}/{'/'.join(folders[first:])}{word}{function}" for first in range(1, len(folders))]
    forms = [source, *shorter, f"{folders[-1]}{word}{function}", folders[-1]]
    return next((form for form in forms if len(form) <= most), _tail(folders[-1], most))


def short_module(name: str, most: int) -> str:
    """A dotted name in at most so many letters, without its outer modules: blocks.*.attention -> '….attention'."""
    names = name.split(".")
    forms = [name, *(f"{CUT}.{'.'.join(names[first:])}" for first in range(1, len(names)))]
    return next((form for form in forms if len(form) <= most), _tail(names[-1], most))


def _tail(text: str, most: int) -> str:
    return text if len(text) <= most else f"{CUT}{text[len(text) - most + 1 :]}" if most > 1 else ""
