"""The limits on what is read of one file from outside, so that no file takes the machine's memory or hours of time.

A limit is far above what the programs that write such files put into one. `docs/reliability.md` says what the limits
mean for memory and time.
"""

import dataclasses
from dataclasses import dataclass
from typing import Self

from steplab.errors import UserError
from steplab.units import GIB, MIB

OPTION = "--raise-limits"
"""The option of every command that reads such files."""
_MOST = 10_000.0


class LimitReached(Exception):
    """A file has more than is read of one; the message completes a line that begins with the file's name."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; if the file is right, {OPTION} 4 allows up to four times as much")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The most that reading one file may take."""

    memory_bytes: int = 8 * GIB
    """Memory of the process that reads a trace or a snapshot; the operating system refuses it more."""
    processor_s: int = 300
    """Processor time of that process, in seconds; the operating system ends it then."""
    import_bytes: int = GIB
    """Bytes of records that one import reads; they are held in memory until all of them were checked."""
    record_bytes: int = 64 * MIB
    """Bytes of one record."""
    num_lines: int = 2_000_000
    """Lines of a file of records."""

    def times(self, factor: float) -> Self:
        """All limits raised by a factor. Raises UserError unless it is 1 to 10,000."""
        if not 1 <= factor <= _MOST:
            raise UserError(f"{OPTION} must be from 1 to {_MOST:.0f}, not {factor:g}")
        raised = {field.name: int(getattr(self, field.name) * factor) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **raised)
