"""What the variables of torchrun say of this process: its place among several, and where they meet.

steplab sets the same variables for the processes that it starts itself, apart from where they meet.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from steplab.errors import UserError

LOOPBACK = "127.0.0.1"
"""The address at which a machine reaches itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of a process among several."""

    rank: int
    """RANK: this process among all."""
    size: int
    """WORLD_SIZE: processes in all."""
    local_rank: int
    """LOCAL_RANK: this process among those of its machine (of one launcher)."""
    local_size: int
    """LOCAL_WORLD_SIZE."""

    @property
    def is_first(self) -> bool:
        """Whether it is the process that stores and prints."""
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """The variables that say so."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Torchrun(Place):
    """One of the processes that torchrun, or whatever sets the same variables, has started."""

    address: str
    """MASTER_ADDR: where the processes meet."""
    port: int
    """MASTER_PORT."""
    agent_store: bool
    """Whether the launcher itself serves that place, or the first process has to."""

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all of them are on this machine."""
        return self.local_size == self.size or self.address == "localhost" or self.address.startswith("127.")


def torchrun_around(environment: Mapping[str, str] = os.environ) -> Torchrun | None:
    """What torchrun says of this process; None where there is none around it, or where it started one process only.

    Raises UserError where the variables contradict each other or do not suffice.
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


def place_in(environment: Mapping[str, str] = os.environ) -> Place:
    """The place that the variables name, RANK and WORLD_SIZE among them. Raises UserError where one is no number."""
    return Place(
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
