"""The errors that users see, and the exit code of each.

Exit codes: 0 fine; 1 failure; 2 usage; 3 inconclusive; 4 a measured regression; 130 interrupted.
Every error that a user can cause is a `SteplabError`: one line that says what is wrong and how to fix it.
"""

import sys
import warnings

from steplab.ops.errors import Unsupported as UnsupportedByOps
from steplab.ops.errors import UserError as OpsError
from steplab.parallel.errors import Unsupported as UnsupportedByParallel
from steplab.parallel.errors import UserError as ParallelError


class SteplabError(Exception):
    """Steplab could not do what was asked; the message is one line for the user."""

    exit_code = 1


class UserError(SteplabError):
    """The request itself is wrong; the message says what to type instead."""

    exit_code = 2


class Inconclusive(SteplabError):
    """Two measurements cannot be compared; the message says in what they differ."""

    exit_code = 3


class Remark(UserWarning):
    """Something that the user should know while the work continues; the message is one line.

    A Python warning, so that a caller of any layer may turn it off or into an error. The command line prints it.
    """


class LeftOut(Remark):
    """One record was skipped and the work continues."""

    def __init__(self, message: str, error: Exception) -> None:
        super().__init__(message)
        self.error = error
        """The error for which it could not be read or drawn."""


def warn_caller(warning: Warning) -> None:
    """Issue a warning as of the line that called steplab, whichever layers lie between: Python prints that line."""
    frame, depth, level = sys._getframe().f_back, 1, 1
    while frame is not None:
        depth += 1
        if str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
            level = depth  # of the outermost frame of steplab; between two of them may be contextlib's
        elif frame.f_globals.get("__name__") == "contextlib" and level == depth - 1:
            level = depth  # it leaves a context of steplab's for the caller
        frame = frame.f_back
    warnings.warn(warning, stacklevel=level + 1)


class Unsupported(UserError):
    """A valid request that this device, build or model does not support; steplab never falls back silently."""

    def __init__(self, what: str, why: str, instead: str) -> None:
        super().__init__(f"{what} is not supported: {why}; {instead}")
        self.why = why
        """The reason, without the request and the alternative."""


UNSUPPORTED = (Unsupported, UnsupportedByOps, UnsupportedByParallel)
ERRORS = (SteplabError, OpsError, ParallelError)
"""Errors whose message is for the user: steplab's, and those of the two folders that know nothing of it, so that they
can be copied into another project."""


def own_error(error: Exception) -> SteplabError:
    """One of `ERRORS` as steplab's, which has an exit code."""
    if isinstance(error, SteplabError):
        return error
    return Unsupported(*error.args) if isinstance(error, UNSUPPORTED) else UserError(*error.args)
