"""torch's private interfaces, all of them here, each with what happens where it is missing.

How much memory a refused allocation asked for: torch's message rounds it to two decimals, its observer does
not. Without the observer the message serves.
"""

import re
from typing import Any

import torch

from steplab.units import GIB, KIB, MIB

_SCALES = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_refused: list[int] = []


def watch_refused_allocations() -> None:
    """Have torch report each allocation the CUDA allocator refuses."""
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and torch.cuda.is_available():
        attach(lambda device, size, device_total, device_free: _refused.append(size))


def last_refused_bytes() -> int | None:
    """Size of the last allocation refused since the watch began; None if none was reported."""
    return _refused[-1] if _refused else None


def bytes_in_message(message: str) -> int | None:
    """The size in "Tried to allocate 2.00 GiB", to the two decimals it is given with."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return round(float(found[1]) * _SCALES[found[2]]) if found else None
