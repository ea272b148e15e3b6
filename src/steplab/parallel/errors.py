"""The errors of this folder; each message is one line that says what is wrong and how to fix it."""


class UserError(Exception):
    """The request itself is wrong; the message says what to give instead."""


class Unsupported(UserError):
    """A valid request that these ranks, this device or this model do not support; nothing falls back silently."""

    def __init__(self, what: str, why: str, instead: str) -> None:
        super().__init__(what, why, instead)

    def __str__(self) -> str:
        return "{} is not supported: {}; {}".format(*self.args)
