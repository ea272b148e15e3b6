"""Whether this process is one of several that torchrun (or whatever sets the same variables) has started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from steplab.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Torchrun:
    """What the variables say."""

    rank: int
    """RANK: this process among all."""
    size: int
    """WORLD_SIZE: processes in all."""
    local_rank: int
    """LOCAL_RANK: this process among those of its machine (of one launcher)."""
    local_size: int
    """LOCAL_WORLD_SIZE."""
    address: str
    """MASTER_ADDR: where the processes meet."""
    port: int
    """MASTER_PORT."""
    agent_store: bool
    """Whether the launcher itself serves that place, or the first process has to."""

    @property
    def is_first(self) -> bool:
        """Whether it is the process that stores and prints."""
        return self.rank == 0


def torchrun_around(environment: Mapping[str, str] = os.environ) -> Torchrun | None:
    """What torchrun says of this process; None where there is none around it, or where it started one process only.

    Raises UserError where the variables contradict each other or do not suffice.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, size = _number("RANK", environment), _number("WORLD_SIZE", environment)
    if size == 1:
        return None
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        raise UserError(
            "RANK and WORLD_SIZE are set and MASTER_ADDR or MASTER_PORT is not: start the processes by torchrun, "
            "or unset all four"
        )
    if not 0 <= rank < size:
        raise UserError(f"RANK {rank} is not below WORLD_SIZE {size}: start the processes by torchrun")
    return Torchrun(
        rank=rank,
        size=size,
        local_rank=_number("LOCAL_RANK", environment, 0),
        local_size=_number("LOCAL_WORLD_SIZE", environment, 1),
        address=environment["MASTER_ADDR"],
        port=_number("MASTER_PORT", environment),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(name: str, environment: Mapping[str, str], default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"the variable {name} is '{text}' and should be a number: start the processes by torchrun")
    return int(text)
