"""Errors of this folder; a message is one line with the fault and its fix."""


class UserError(Exception):
    """The request itself is wrong; the message names a valid one."""


class Unsupported(UserError):
    """A valid request that these ranks, this device or this model do not support."""

    def __init__(self, what: str, why: str, instead: str) -> None:
        super().__init__(what, why, instead)

    def __str__(self) -> str:
        return "{} is not supported: {}; {}".format(*self.args)
