"""Peer memory of processes on one CPU: a file that all have mapped, and numbers in it that they watch."""

import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

LONGEST_S = 20.0


class SharedMemory:
    """As SymmetricMemory is of GPUs; every call is done when it returns. Sleeps up to delay_s before each signal."""

    num_channels = 6

    def __init__(self, delay_s: float = 0.0) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
        self.delay_s, self.random = delay_s, random.Random(self.rank)
        self.copied = 0

    def allocate(self, num_bytes: int) -> list[Tensor]:
        folder: list[str | None] = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder)
        assert folder[0] is not None

        def mapped(name: str, count: int, dtype: torch.dtype) -> Tensor:
            return torch.from_file(str(Path(folder[0] or "") / name), shared=True, size=count, dtype=dtype)

        mine = mapped(f"memory{self.rank}", num_bytes, torch.uint8)
        mine.zero_()
        count = self.size * self.size * self.num_channels
        self.flags = mapped("flags", count, torch.int32).view(self.size, self.num_channels, self.size)
        dist.barrier()
        return [mapped(f"memory{rank}", num_bytes, torch.uint8) for rank in range(self.size)]

    def signal(self, peer: int, channel: int) -> None:
        time.sleep(self.random.uniform(0, self.delay_s))
        self._turn(self.flags[peer, channel, self.rank], 0, 1)

    def await_signal(self, peer: int, channel: int) -> None:
        self._turn(self.flags[self.rank, channel, peer], 1, 0)

    def _turn(self, flag: Tensor, expected: int, new: int) -> None:
        until = time.monotonic() + LONGEST_S
        while int(flag) != expected:
            if time.monotonic() > until:
                raise TimeoutError(f"rank {self.rank}: a signal did not become {expected}")
            time.sleep(0.0002)
        flag.fill_(new)
