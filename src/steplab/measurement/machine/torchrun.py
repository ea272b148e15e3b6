"""The environment variables of torchrun: this process's place among several, and where they meet.

steplab sets the variables of the place for the processes that it starts itself.
"""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass

import psutil  # type: ignore[import-untyped]

from steplab.errors import UserError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlace:
    rank: int
    size: int
    local_rank: int
    """Rank among one launcher's processes, usually on one machine."""
    local_size: int

    @property
    def is_first(self) -> bool:
        """True for the process that stores and prints."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Torchrun(ProcessPlace):
    """A process started by torchrun, or by another launcher with the same variables."""

    address: str
    port: int
    agent_store: bool
    """True if the launcher serves the store; otherwise the first process does."""

    @property
    def is_on_one_machine(self) -> bool:
        return self.local_size == self.size or self.address == "localhost" or self.address.startswith("127.")


def torchrun_around(environment: Mapping[str, str] = os.environ) -> Torchrun | None:
    """The launcher's variables; None without torchrun or with only one process. Raises UserError if they are
    contradictory or incomplete.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    place = place_in(environment)
    if place.size == 1:
        return None
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        raise UserError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not; start the processes by torchrun, "
            "or unset all four"
        )
    if not 0 <= place.rank < place.size:
        raise UserError(f"RANK {place.rank} is not below WORLD_SIZE {place.size}; start the processes by torchrun")
    return Torchrun(
        **asdict(place),
        address=environment["MASTER_ADDR"],
        port=_number("MASTER_PORT", environment),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def place_in(environment: Mapping[str, str] = os.environ) -> ProcessPlace:
    """Rank and size from the environment. Raises UserError if a variable is not a number."""
    return ProcessPlace(
        rank=_number("RANK", environment),
        size=_number("WORLD_SIZE", environment),
        local_rank=_number("LOCAL_RANK", environment, 0),
        local_size=_number("LOCAL_WORLD_SIZE", environment, 1),
    )


def _number(name: str, environment: Mapping[str, str], default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"the variable {name} must be a number, not '{text}'; start the processes by torchrun")
    return int(text)


def environment_of(place: ProcessPlace) -> dict[str, str]:
    """Environment variables of a rank on this machine: its place, its share of the cores (torch would give each rank
    all), and loopback.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // place.size)))
    keep_to_loopback(environment)
    return environment | {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
    }


def keep_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL listen on loopback, unless their variables name another interface.

    Others can be reached from other machines, and neither library authenticates.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
            environment.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # "=": not a prefix
            break
    environment.setdefault("NCCL_RAS_ENABLE", "0")
