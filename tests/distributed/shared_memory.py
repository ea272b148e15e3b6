"""Peer memory of processes on one CPU: files that all have mapped, and numbers in one of them that they watch."""

import ctypes
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

    def __init__(self, delay_s: float = 0.0) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
        self.delay_s, self.random = delay_s, random.Random(self.rank)
        self.copied_bytes = 0

    def allocate(self, num_bytes: int, num_counters: int) -> tuple[Tensor, list[int]]:
        folder: list[str | None] = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder)

        def mapped(name: str, count: int, dtype: torch.dtype) -> Tensor:
            return torch.from_file(str(Path(str(folder[0])) / name), shared=True, size=count, dtype=dtype)

        counters = mapped("counters", self.size * num_counters, torch.int64)
        self.counters = counters.view(self.size, num_counters)
        mine = mapped(f"memory{self.rank}", num_bytes, torch.uint8)
        dist.barrier()
        self.everyone = [mapped(f"memory{rank}", num_bytes, torch.uint8) for rank in range(self.size)]
        self.everyone[self.rank] = mine
        return mine, [memory.data_ptr() for memory in self.everyone]

    def follow_current(self, *lines: int) -> None:
        """All is done already."""

    def current_awaits(self, counter: int, value: int) -> None:
        self.await_signal(0, counter, value)

    def copy(self, line: int, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)
        self.copied_bytes += num_bytes

    def mean(
        self, line: int, target: int, own: int, others: int, distance_bytes: int, count: int, dtype: torch.dtype
    ) -> None:
        rows = [own, *(others + row * distance_bytes for row in range(self.size - 1))]
        total = torch.stack([at(address, count, dtype) for address in rows]).double().sum(0)
        at(target, count, dtype).copy_(total / self.size)

    def signal(self, line: int, rank: int, counter: int, value: int) -> None:
        time.sleep(self.random.uniform(0, self.delay_s))
        self.counters[rank, counter] = value

    def await_signal(self, line: int, counter: int, value: int) -> None:
        until = time.monotonic() + LONGEST_S
        while int(self.counters[self.rank, counter]) < value:
            if time.monotonic() > until:
                raise TimeoutError(f"rank {self.rank}: counter {counter} did not get to {value}")
            time.sleep(0.0002)


def at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """So many numbers at an address."""
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)
