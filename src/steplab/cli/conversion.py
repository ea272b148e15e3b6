"""Corrections of option values before cyclopts converts them."""

import functools
import math
import operator
import os
from pathlib import Path
from typing import Any, get_args

from cyclopts import App, ArgumentCollection

from steplab.errors import UserError

_MOST = 2**63 - 1
"""Largest whole number that the store, torch and random generators all accept."""


def as_meant(app: App, command: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Correct what cyclopts and shells would misread.

    cyclopts takes "none" and "null" for a missing option, and rounds fractions for whole numbers. No shell expands the
    ~ of `--store=~/runs.db`.

    Raises UserError for a fraction, an infinite number, NaN, or a whole number above 64 bits.
    """
    for argument in arguments:
        argument.hint = _without_none(argument.hint)
        if argument.hint is Path:
            argument.tokens = [token.evolve(value=os.path.expanduser(token.value)) for token in argument.tokens]
        for token in argument.tokens:
            if asked := _asked_instead(argument.hint, token.value):
                raise UserError(f"{token.keyword or argument.name} must be {asked}, not '{token.value}'")


def _without_none(hint: Any) -> Any:
    members = get_args(hint)
    if type(None) not in members:
        return hint
    return functools.reduce(operator.or_, (member for member in members if member is not type(None)))


def _asked_instead(hint: Any, text: str) -> str | None:
    """The requirement that a number violates; None also for a text that is no number, which cyclopts reports."""
    try:
        if hint is int:
            return "a whole number" if "." in text else None if abs(int(text)) <= _MOST else "below 2^63"
        if hint is float:
            return None if math.isfinite(float(text)) else "a finite number"
    except ValueError:
        pass
    return None
