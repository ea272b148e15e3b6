"""The refusal of a file that is not a memory snapshot."""


class Refused(Exception):
    """The file is refused; the message completes a line that begins with the file's name."""


def expect(condition: bool, why: str) -> None:
    """Raise Refused unless the condition holds."""
    if not condition:
        raise Refused(why)
