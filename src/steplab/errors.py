"""What can go wrong, and the exit code it ends with.

Exit codes: 0 fine; 1 failure; 2 usage; 3 inconclusive; 4 a measured regression; 130 interrupted.
Every error a user can cause is a `SteplabError`: one line that says what is wrong and how to mend it.
"""


class SteplabError(Exception):
    """Something steplab could not do; the message is one line meant for the user."""

    exit_code = 1


class UserError(SteplabError):
    """The request itself is wrong; the message names the fix."""

    exit_code = 2


class LeftOut(UserWarning):
    """One record was skipped and the rest goes on; the message is one line meant for the user.

    A Python warning, so that a caller of any layer may turn it off or into an error. The command line prints it.
    """

    def __init__(self, message: str, error: Exception) -> None:
        super().__init__(message)
        self.error = error
        """What kept it from being read or drawn."""


class Unsupported(UserError):
    """A valid request that this device, build or model cannot serve; never answered by a silent fallback."""

    def __init__(self, what: str, why: str, instead: str) -> None:
        super().__init__(f"{what} is not supported: {why}; {instead}")
        self.why = why
        """The reason alone."""
