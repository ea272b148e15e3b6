"""What the values of options mean, before cyclopts converts them."""

import functools
import math
import operator
import os
from pathlib import Path
from typing import Any, get_args

from cyclopts import App, ArgumentCollection

from steplab.errors import UserError

_MOST = 2**63 - 1
"""The largest whole number that the store, torch and generators of random numbers all take."""


def as_meant(app: App, command: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take values as they are meant where cyclopts and the shell do not.

    cyclopts takes the words "none" and "null" for an option that was not given, and rounds a fraction where a whole
    number is asked for. An option that is not given has its default, and no word stands for that. No shell replaces the
    ~ of `--store=~/runs.db`.

    Raises UserError for a fraction, an infinite number or NaN, and a whole number of more than 64 bits, from the
    command line and from a file of defaults alike.
    """
    for argument in arguments:
        argument.hint = _without_none(argument.hint)
        if argument.hint is Path:
            argument.tokens = [token.evolve(value=os.path.expanduser(token.value)) for token in argument.tokens]
        for token in argument.tokens:
            if asked := _asked_instead(argument.hint, token.value):
                where = "" if token.source in ("", "cli") else f" in {token.source}"
                raise UserError(f"{token.keyword or argument.name}{where} must be {asked}, not '{token.value}'")


def _without_none(hint: Any) -> Any:
    members = get_args(hint)
    if type(None) not in members:
        return hint
    return functools.reduce(operator.or_, (member for member in members if member is not type(None)))


def _asked_instead(hint: Any, text: str) -> str | None:
    """What a number must be that this is not; None: it may be right, or is none, which cyclopts says."""
    try:
        if hint is int:
            return "a whole number" if "." in text else None if abs(int(text)) <= _MOST else "below 2^63"
        if hint is float:
            return None if math.isfinite(float(text)) else "a finite number"
    except ValueError:
        pass
    return None
