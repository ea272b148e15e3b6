"""What the values of options may be, where cyclopts takes more than is meant."""

import functools
import operator
from typing import Any, get_args

from cyclopts import App, ArgumentCollection

from steplab.errors import UserError


def only_as_written(app: App, command: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Keep cyclopts from reading a value as another one.

    It takes the words "none" and "null" for an option that was not given, and rounds a fraction where a whole number is
    asked for. An option that is not given has its default, and no word stands for that. Raises UserError for a
    fraction, from the command line and from a file of defaults alike.
    """
    for argument in arguments:
        argument.hint = _without_none(argument.hint)
        for token in argument.tokens if argument.hint is int else ():
            if "." in token.value:
                raise UserError(f"{token.keyword or argument.name} must be a whole number, not '{token.value}'")


def _without_none(hint: Any) -> Any:
    members = get_args(hint)
    if type(None) not in members:
        return hint
    return functools.reduce(operator.or_, (member for member in members if member is not type(None)))
