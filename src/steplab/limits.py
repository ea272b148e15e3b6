"""Limits on reading one outside file, so that no file takes the machine's memory or hours.

They are far above the sizes that programs write. `docs/reliability.md` explains them.
"""

import dataclasses
from dataclasses import dataclass
from typing import Self

from steplab.errors import UserError
from steplab.units import GIB, MIB

OPTION = "--raise-limits"
"""Option that multiplies these limits, on every command that reads outside files."""
_MOST = 10_000.0


class LimitReached(Exception):
    """Raised for a file beyond a limit; the message follows the file's name."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; if you trust the file, {OPTION} 4 allows four times as much")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    memory_bytes: int = 8 * GIB
    """Memory of the reading process, enforced by the operating system."""
    processor_s: int = 300
    """CPU seconds of the reading process, after which the operating system ends it."""
    import_bytes: int = GIB
    """Bytes of records per import; all stay in memory until checked."""
    record_bytes: int = 64 * MIB
    num_lines: int = 2_000_000

    def times(self, factor: float) -> Self:
        """The limits multiplied by `factor`. Raises UserError unless it is 1 to 10,000."""
        if not 1 <= factor <= _MOST:
            raise UserError(f"{OPTION} must be from 1 to {_MOST:.0f}, not {factor:g}")
        raised = {field.name: int(getattr(self, field.name) * factor) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **raised)
