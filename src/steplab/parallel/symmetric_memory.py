"""Peer memory of the GPUs of one host: torch's symmetric memory, copy engines, and waits that take no multiprocessor.

A wait is the stream's, and runs no kernel. What the host does for a bucket is the driver's calls and little more (see
cuda_driver.py): it has to keep ahead of the GPU.

A host that is ahead gives the lines their waits long before they can end: before a whole forward pass, say. In records
of H200s the kernels of some models' forward passes then began 1.1 to 1.3 microseconds later each (docs/ddp.md), which
we put down to the streams that these models had been given. Which streams delay others is documented nowhere, so pairs
of them are tried when the memory is made, and the pair under which kernels take least becomes the lines.
"""

import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steplab.errors import Unsupported
from steplab.parallel.collectives import Collectives
from steplab.parallel.cuda_driver import CudaDriver, MemoryOperations
from steplab.parallel.peer_means import Means
from steplab.parallel.peer_memory import Piece
from steplab.parallel.peer_parts import COUNTER_BYTES

_NUM_LINES = 2
_PAIRS, _TRIALS, _KERNELS = 4, 3, 400
"""Pairs of streams that are tried, how often, and how many kernels each time."""
_HELD_CYCLES = 20_000_000
"""How long the GPU is held so that those kernels are queued, in cycles of its clock: some ten milliseconds."""


class SymmetricMemory:
    """The peer memory of GPUs of one host (peer_memory.PeerMemory). `device` is the current device wherever this is
    built and used."""

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Raises Unsupported, on all ranks, where one cannot reach another's memory."""
        what, instead = "the transport peer_copy", "use transport='collectives'"
        if device.type != "cuda":
            raise Unsupported(f"{what} on {device.type}", "it is for the copy engines of CUDA GPUs", instead)
        places = collectives.host_gather((socket.gethostname(), device.index))
        hosts = {host for host, _ in places}
        if len(hosts) > 1:
            raise Unsupported(f"{what} between {len(hosts)} hosts", "only GPUs of one host reach each other", instead)
        reached = all(i == device.index or torch.cuda.can_device_access_peer(device, i) for _, i in places)
        if not all(collectives.host_gather(reached)):
            raise Unsupported(f"{what} between these GPUs", "one of them cannot address another's memory", instead)
        self.rank, self.size, self.device = collectives.rank, collectives.size, device
        self._group: Any = dist.group.WORLD if group is None else group
        self._driver = CudaDriver(device.index)
        self._streams: list[torch.cuda.Stream] = []
        self._lines: list[int] = []
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(device))  # it exists from then on
        self._operations: dict[Any, MemoryOperations] = {}
        self._means = Means(device, self.size - 1)

    def allocate(self, num_bytes: int, num_counters: int) -> tuple[Tensor, list[int]]:
        # The one private module that is used: there is no other way to memory that other processes can address.
        import torch.distributed._symmetric_memory as symmetric

        start = max(-(-num_bytes // COUNTER_BYTES), 1) * COUNTER_BYTES
        self._own = symmetric.empty(start + num_counters * COUNTER_BYTES, dtype=torch.uint8, device=self.device)
        self._own.zero_()
        self._handle = symmetric.rendezvous(self._own, self._group)
        self._meet()  # nobody writes before all are zero
        self._bases = [int(pointer) for pointer in self._handle.buffer_ptrs]
        self._counters = [base + start for base in self._bases]
        self._choose_lines()
        self._meet()  # no rank still tries
        self._own[start:].zero_()
        self._meet()
        return self._own[:num_bytes], self._bases

    def _meet(self) -> None:
        """Return when all ranks have come here with all their work done."""
        torch.cuda.synchronize(self.device)
        self._handle.barrier()
        torch.cuda.synchronize(self.device)

    def _choose_lines(self) -> None:
        """Take the pair of streams whose waits slow the current stream least; all ranks try together, by counters that
        are zeroed after it."""
        pairs = [[torch.cuda.Stream(self.device, priority=-1) for _ in range(_NUM_LINES)] for _ in range(_PAIRS)]
        least_ms = [float("inf")] * _PAIRS
        for trial in range(_TRIALS * _PAIRS):
            place = trial % _PAIRS
            self._lines = [stream.cuda_stream for stream in pairs[place]]
            least_ms[place] = min(least_ms[place], self._tried_ms(trial + 1))
        self._streams = pairs[least_ms.index(min(least_ms))]
        self._lines = [stream.cuda_stream for stream in self._streams]

    def _tried_ms(self, number: int) -> float:
        """How long small kernels take while the lines wait for them, and then for the other ranks, as for a bucket."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        numbers = torch.zeros(1, device=self.device)
        sleep: Any = torch.cuda._sleep
        sleep(_HELD_CYCLES)
        begin.record()
        for _ in range(_KERNELS):
            numbers.add_(1)
        end.record()
        self.follow_current(0)
        own, others = self._bases[self.rank], [self._bases[peer] for peer in peers]
        self.copy(0, others, [own] * len(peers), [COUNTER_BYTES] * len(peers))  # of zeros onto zeros
        self.signal(0, tuple((peer, self.rank) for peer in peers), number)
        self.follow_line(1, 0)
        self.await_signals(1, tuple(peers), number)
        end.synchronize()
        return begin.elapsed_time(end)

    def follow_current(self, line: int) -> None:
        event = self._ready.cuda_event
        self._driver.record(event, self._current())
        self._driver.wait_event(self._lines[line], event)

    def follow_line(self, line: int, other: int) -> None:
        event = self._ready.cuda_event
        self._driver.record(event, self._lines[other])
        self._driver.wait_event(self._lines[line], event)

    def current_awaits(self, counters: tuple[int, ...], value: int) -> None:
        self._await(self._current(), counters, value)

    def copy(self, line: int, targets: Sequence[int], sources: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        self._driver.copy(self._lines[line], targets, sources, sizes_bytes)

    def mean(
        self, line: int, pieces: Sequence[Piece], target: int, others: int, distance_bytes: int, dtype: torch.dtype
    ) -> None:
        self._means.start(self._lines[line], pieces, target, others, distance_bytes, dtype)

    def signal(self, line: int, places: tuple[tuple[int, int], ...], value: int) -> None:
        operations = self._operations.get(places)
        if operations is None:
            addresses = [self._counters[rank] + counter * COUNTER_BYTES for rank, counter in places]
            operations = self._operations[places] = self._driver.writes(addresses)
        operations.start(self._lines[line], value)

    def await_signals(self, line: int, counters: tuple[int, ...], value: int) -> None:
        self._await(self._lines[line], counters, value)

    def _await(self, stream: int, counters: tuple[int, ...], value: int) -> None:
        operations = self._operations.get(counters)
        if operations is None:
            addresses = [self._counters[self.rank] + counter * COUNTER_BYTES for counter in counters]
            operations = self._operations[counters] = self._driver.waits(addresses)
        operations.start(stream, value)

    def _current(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))  # a tenth of what a Stream takes to be made
