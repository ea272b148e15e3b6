"""Peer memory of processes on one CPU: mapped files, with numbers in one of them to watch. A line is a thread that
works in order, with optional delay; the current stream is the host.
"""

import ctypes
import queue
import random
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from steplab.parallel.peer_memory import PeerMemory, Piece

LONGEST_S = 20.0
NUM_LINES = 2
Work = Callable[[], None]


class SharedMemory(PeerMemory):
    def __init__(self, delay_s: float = 0.0) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
        self.copied_bytes = 0
        self._queues: list[queue.SimpleQueue[Work | None]] = [queue.SimpleQueue() for _ in range(NUM_LINES)]
        for number, line in enumerate(self._queues):
            delays = random.Random(NUM_LINES * self.rank + number)
            threading.Thread(target=_serve, args=(line, delays, delay_s), daemon=True).start()
            weakref.finalize(self, line.put, None)

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
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(str(folder[0]))  # what is mapped stays
        return mine, [memory.data_ptr() for memory in self.everyone]

    def follow_current(self, line: int) -> None: ...

    def follow_line(self, line: int, other: int) -> None:
        reached = threading.Event()
        self._queues[other].put(reached.set)
        self._queues[line].put(lambda: _reach(reached))

    def current_awaits(self, counters: tuple[int, ...], value: int) -> None:
        _await(self.counters, self.rank, counters, value)

    def copy(self, line: int, targets: Sequence[int], sources: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        copies = list(zip(targets, sources, sizes_bytes, strict=True))
        self._queues[line].put(lambda: _copy(copies))
        self.copied_bytes += sum(sizes_bytes)

    def mean(
        self, line: int, pieces: Sequence[Piece], target: int, others: int, distance_bytes: int, dtype: torch.dtype
    ) -> None:
        firsts = [others + row * distance_bytes for row in range(self.size - 1)]
        self._queues[line].put(lambda: _mean(pieces, target, firsts, dtype))

    def signal(self, line: int, places: tuple[tuple[int, int], ...], value: int) -> None:
        counters = self.counters
        self._queues[line].put(lambda: _set(counters, places, value))

    def await_signals(self, line: int, counters: tuple[int, ...], value: int) -> None:
        numbers, rank = self.counters, self.rank
        self._queues[line].put(lambda: _await(numbers, rank, counters, value))


def _serve(line: "queue.SimpleQueue[Work | None]", delays: random.Random, delay_s: float) -> None:
    while work := line.get():
        time.sleep(delays.uniform(0, delay_s))
        work()


def _copy(copies: list[tuple[int, int, int]]) -> None:
    for target, source, num_bytes in copies:
        ctypes.memmove(target, source, num_bytes)


def _mean(pieces: Sequence[Piece], target: int, firsts: list[int], dtype: torch.dtype) -> None:
    for own, start, num_bytes in pieces:
        rows = [own, *(first + start for first in firsts)]
        count = num_bytes // dtype.itemsize
        total = torch.stack([at(address, count, dtype) for address in rows]).double().sum(0)
        at(target + start, count, dtype).copy_(total / len(rows))


def _reach(reached: threading.Event) -> None:
    if not reached.wait(LONGEST_S):
        raise TimeoutError("the other line did not get so far")


def _set(counters: Tensor, places: Sequence[tuple[int, int]], value: int) -> None:
    for rank, counter in places:
        counters[rank, counter] = value


def _await(numbers: Tensor, rank: int, counters: Sequence[int], value: int) -> None:
    until, pause_s = time.monotonic() + LONGEST_S, 0.0001
    mine = numbers[rank].numpy()
    while any(mine[counter] < value for counter in counters):
        if time.monotonic() > until:
            raise TimeoutError(f"rank {rank}: counters {counters} did not get to {value}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.002)  # many ranks that look often leave little of a core to those that work


def at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)
