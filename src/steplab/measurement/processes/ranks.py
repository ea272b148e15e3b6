"""What several processes on one machine need: memory for all of them, and the environment variables of each."""

import os

import psutil  # type: ignore[import-untyped]

from steplab.errors import UserError
from steplab.measurement.machine.torchrun import LOOPBACK, ProcessPlace, Torchrun
from steplab.units import MIB, format_bytes

_PROCESS_BYTES = 128 * MIB
"""The memory of a process that has only loaded torch."""


def refuse_too_many(processes: int) -> None:
    """Raise UserError if the processes would not fit into the free memory with torch alone loaded.

    A machine that swaps needs minutes to fail, and cannot be used meanwhile.
    """
    available = psutil.virtual_memory().available
    if processes * _PROCESS_BYTES > available:
        raise UserError(
            f"{processes} processes do not fit: each takes at least {format_bytes(_PROCESS_BYTES)}, and "
            f"{format_bytes(available)} of memory are free; start at most {available // _PROCESS_BYTES}"
        )


def environment_of(place: ProcessPlace) -> dict[str, str]:
    """The environment variables of a rank's process: its place and, if all ranks are on this machine, loopback for its
    sockets.

    gloo and NCCL would otherwise listen on an interface that other machines reach, and neither authenticates who
    connects.
    """
    environment = dict(os.environ)
    if not isinstance(place, Torchrun):
        # one core per rank: torch would give each rank all cores
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // place.size)))
    if not isinstance(place, Torchrun) or place.is_on_one_machine:
        interface = _loopback_interface()
        if interface is not None:
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
            environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": not a prefix
        environment.setdefault("NCCL_RAS_ENABLE", "0")
    return environment | place.variables()


def _loopback_interface() -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return str(name)
    return None
