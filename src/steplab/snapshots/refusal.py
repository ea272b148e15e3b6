"""Why a file is not taken for a memory snapshot."""


class Refused(Exception):
    """The message completes a line that begins with the file's name."""


def expect(condition: bool, why: str) -> None:
    """Raises Refused unless the condition holds."""
    if not condition:
        raise Refused(why)
