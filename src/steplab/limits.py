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
        super().__init__(f"{what}; if the file is right, {OPTION} 4 reads up to four times as much")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The most that is read of one file."""

    num_bytes: int = 16 * GIB
    """Bytes of a file, those of a compressed one counted as they come out of it."""
    growth: int = 400
    """Bytes that come out of a compressed file for each byte that goes in, after the first `free_growth_bytes`. A trace
    unpacks to 10 to 40 times its size."""
    free_growth_bytes: int = 64 * MIB
    """Bytes that may come out of a compressed file of any size."""
    unpacker_bytes: int = 256 * MIB
    """Memory that unpacking may take: an xz file says how large a dictionary it needs."""
    import_bytes: int = GIB
    """Bytes of records that one import reads; they are held in memory until all of them were checked."""
    record_bytes: int = 64 * MIB
    """Bytes of one record."""
    num_lines: int = 2_000_000
    """Lines of a file of records."""
    small_file_bytes: int = 64 * MIB
    """Bytes of a file that is read as a whole: a study, a grid, a configuration, a table, marks of a snapshot."""
    num_events: int = 10_000_000
    """Events of a trace that are kept: kernels, copies, calls, operators and ranges."""
    num_skipped: int = 200_000_000
    """Events of a trace that are not kept."""
    num_unreadable: int = 1_000_000
    """Elements of a trace's list that are no events."""
    num_allocations: int = 40_000_000
    """Events of a memory snapshot."""
    num_frames: int = 30_000_000
    """Frames of all different stacks of a memory snapshot together."""
    num_instructions: int = 50_000_000
    """Instructions of a pickle that are executed one by one; long lists of events are not."""
    object_bytes: int = 3 * GIB // 2
    """Memory of the objects of a pickle, by a rough count."""

    def times(self, factor: float) -> Self:
        """All limits raised by a factor. Raises UserError unless it is 1 to 10,000."""
        if not 1 <= factor <= _MOST:
            raise UserError(f"{OPTION} must be from 1 to {_MOST:.0f}, not {factor:g}")
        raised = {field.name: int(getattr(self, field.name) * factor) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **raised)
