"""Memory that the ranks of one host share, and the signals with which they tell each other what is in it.

Copies between GPUs of one host can be made by their copy engines, which take no multiprocessor from the work that runs
beside them. This needs addresses of memory on the other GPUs (torch's symmetric memory) and a way for one GPU to wait
until another has written, without the host.
"""

import socket
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from steplab.errors import Unsupported, UserError
from steplab.parallel.collectives import Collectives

TIMEOUT_MS = 600_000
"""How long a GPU waits for a signal before it gives up, with an error: as long as NCCL does for a collective."""


class PeerMemory(Protocol):
    """What ranks that reach each other's memory can do. Everything is given to the current stream, in order."""

    rank: int
    """This process's place, from 0."""
    size: int
    """How many ranks there are."""
    device: torch.device
    """Where the memory is."""

    @property
    def num_channels(self) -> int:
        """How many signals from one rank to another can be under way at a time."""

    def allocate(self, num_bytes: int) -> list[Tensor]:
        """As many bytes (uint8, zero) on every rank; gives all of them, by rank. Every rank makes the call."""

    def signal(self, peer: int, channel: int) -> None:
        """Once all before it is done, tell the peer. Waits until the last signal on this channel has been heard."""

    def await_signal(self, peer: int, channel: int) -> None:
        """What comes after it begins when the peer has told."""


class SymmetricMemory:
    """Of GPUs, through torch's symmetric memory: allocations that every rank of a group on one host can address."""

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Raises Unsupported where the ranks cannot reach each other's memory."""
        what, instead = "the transport peer_copy", "use transport='collectives'"
        if device.type != "cuda":
            raise Unsupported(f"{what} on {device.type}", "it is for the copy engines of CUDA GPUs", instead)
        hosts = collectives.host_gather(socket.gethostname())
        if len(set(hosts)) > 1:
            raise Unsupported(f"{what} between {len(set(hosts))} hosts", "GPUs of one host reach each other", instead)
        places = collectives.host_gather(device.index)
        reached = all(other == device.index or torch.cuda.can_device_access_peer(device, other) for other in places)
        if not all(collectives.host_gather(reached)):
            raise Unsupported(f"{what} between these GPUs", "one of them cannot address another's memory", instead)
        self.rank, self.size, self.device = collectives.rank, collectives.size, device
        self._group = group if group is not None else dist.group.WORLD
        self._handle: Any = None

    @property
    def num_channels(self) -> int:
        return int(_symmetric.get_signal_pad_size()) // 4 // self.size

    def allocate(self, num_bytes: int) -> list[Tensor]:
        if self._handle is not None:
            raise UserError("symmetric memory is allocated once")
        self._own = _symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._own.zero_()
        self._handle = _symmetric.rendezvous(self._own, self._group)
        torch.cuda.synchronize(self.device)
        self._handle.barrier()
        everyone = [self._handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(self.size)]
        everyone[self.rank] = self._own
        return everyone

    def signal(self, peer: int, channel: int) -> None:
        self._handle.put_signal(peer, channel, TIMEOUT_MS)

    def await_signal(self, peer: int, channel: int) -> None:
        self._handle.wait_signal(peer, channel, TIMEOUT_MS)


class _Lazy:
    """torch.distributed._symmetric_memory, the one private module used here: loaded where it is used."""

    def __getattr__(self, name: str) -> Any:
        import torch.distributed._symmetric_memory as module

        return getattr(module, name)


_symmetric: Any = _Lazy()
