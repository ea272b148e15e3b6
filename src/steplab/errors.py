"""User errors with their exit codes.

0 fine; 1 failure; 2 usage; 3 inconclusive; 4 a measured regression; 130 interrupted. Every error that users can cause
is a `SteplabError`: one line with fault and fix.
"""

import difflib
import sys
import warnings
from collections.abc import Collection

from steplab.ops.errors import Unsupported as UnsupportedByOps
from steplab.ops.errors import UserError as OpsError
from steplab.parallel.errors import Unsupported as UnsupportedByParallel
from steplab.parallel.errors import UserError as ParallelError


class SteplabError(Exception):
    """A failure; its message is one line."""

    exit_code = 1


class UserError(SteplabError):
    """A wrong request; the message names the fix."""

    exit_code = 2


def meant(name: str, known: Collection[str]) -> str:
    """End of an error message about an unknown name: the closest known name, else all known names."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"


class Inconclusive(SteplabError):
    """Two measurements cannot be compared; the message names their differences."""

    exit_code = 3


class Remark(UserWarning):
    """A one-line warning; work continues.

    Callers may silence it or make it an error. The command line prints it.
    """


class LeftOut(Remark):
    """Warns of a skipped record; work continues."""

    def __init__(self, message: str, error: Exception) -> None:
        super().__init__(message)
        self.error = error


def warn_caller(warning: Warning) -> None:
    """Issue a warning at the line that called steplab."""
    frame, depth, level = sys._getframe().f_back, 1, 1
    while frame is not None:
        depth += 1
        if str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
            level = depth  # steplab's outermost frame; contextlib may be between
        elif frame.f_globals.get("__name__") == "contextlib" and level == depth - 1:
            level = depth  # leaves a context of steplab for the caller
        frame = frame.f_back
    warnings.warn(warning, stacklevel=level + 1)


class Unsupported(UserError):
    """A valid request that this device, build or model does not support."""

    def __init__(self, what: str, why: str, instead: str) -> None:
        super().__init__(f"{what} is not supported: {why}; {instead}")
        self.why = why


UNSUPPORTED = (Unsupported, UnsupportedByOps, UnsupportedByParallel)
ERRORS = (SteplabError, OpsError, ParallelError)
"""Exceptions with a message for the user. steplab.ops and steplab.parallel define their own, because they import
nothing else of steplab and can be copied into other projects.
"""


def own_error(error: Exception) -> SteplabError:
    """Convert an exception of `ERRORS` to a SteplabError."""
    if isinstance(error, SteplabError):
        return error
    return Unsupported(*error.args) if isinstance(error, UNSUPPORTED) else UserError(*error.args)
