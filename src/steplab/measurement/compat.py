"""torch's private interfaces, all of them here, each with what happens where it is missing.

How much memory a refused allocation asked for: torch's message rounds it to two decimals, its observer does
not. Without the observer the message serves.

Whether a module is compiled, or watches its own hooks: where torch keeps that elsewhere, it is taken for an ordinary
one, and a profile of it shows what its hooks did to it.
"""

import re
from typing import Any

import torch
from torch import nn

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


def minds_hooks(module: nn.Module) -> bool:
    """Whether hooks on a module, or inside it, would change what runs.

    A compiled one (module.compile(), or torch.compile(module)) would take them into its graph, or compile again; in
    inference, TransformerEncoderLayer leaves its fused path where it finds one.
    """
    compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return compiled or (isinstance(module, nn.TransformerEncoderLayer) and not module.training)
