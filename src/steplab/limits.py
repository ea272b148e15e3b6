"""Limits on reading one file of unknown origin, so that it cannot exhaust the machine's memory or take hours.

Files that programs write stay far below them; see `docs/reliability.md`.
"""

import os

from steplab.units import GIB, MIB

_MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 * GIB
READER_BYTES = _MACHINE_BYTES // 2
"""Memory of the process that reads a trace or snapshot: half of the machine's, enforced by the operating system."""
READER_S = 1800
"""Processor seconds of that process, enforced too."""
IMPORT_BYTES = 4 * GIB
"""Bytes of records per import; all stay in memory until checked."""
RECORD_BYTES = 256 * MIB


class LimitReached(Exception):
    """A file exceeds a limit; callers put the file's name before the message."""
