"""Buckets whose gradients travel by copies into the other ranks' memory, with no collective and no bucket to fill.

Each rank owns a part of every bucket. For a bucket, on four streams of its own beside the backward pass:

1. *outward*: from the tensors that autograd made, each rank copies what belongs to another's part into that one's
   landing place, and signals.
2. *reducing*: the owner waits for the signals and writes the mean of its own and the landed gradients into its part of
   the bucket.
3. *homeward*: it copies that into the same part of everybody's bucket, and signals.
4. *arriving*: everyone waits for those signals. The bucket then holds the averages: the parameters' gradients.

Of B bytes of gradients, each rank sends and receives 2 (n-1)/n B, as in a ring; the copy engines move them. The
multiprocessors read and write B/n (n + 1) bytes for the means. A gradient is read where it was born, and never copied
into a bucket first.

The mean of an element is made by one rank alone, so all ranks have the same bits.

Nobody overwrites what is still read. A landing place is used again some buckets later, after the bucket that it was for
has come home. A peer writes its part of my bucket after it got my gradients of that part, so after I gave the
backward pass that made them to the device, behind the optimizer that read the last averages.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from steplab.parallel.buckets import aligned, dense, flat, same, views_of
from steplab.parallel.mean import mean_into
from steplab.parallel.peer_memory import PeerMemory

WINDOW_BYTES = 512_000_000
"""Gradients that are held, and have landing places, at a time: some blocks of a large model, so that a backward pass
whose gradients come in bursts need not wait."""
_PAGE = 256
"""Bytes at whose multiples buckets and landing places begin."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a part of a bucket and a gradient overlap."""

    index: int
    """Of the gradient."""
    first: int
    """In the gradient, in elements."""
    place: int
    """In the bucket, in elements."""
    count: int
    """Elements."""


class PeerCopies:
    """What the buckets of one module share: memory, streams, and which of them are under way."""

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], memory: PeerMemory) -> None:
        self.memory = memory
        self.module = torch.get_device_module(memory.device)
        self.outward, self.reducing, self.homeward, self.arriving = (self.module.Stream(priority=-1) for _ in range(4))
        self.peers = [(memory.rank + step) % memory.size for step in range(1, memory.size)]
        self.num_launched = 0
        self.under_way: deque[PeerBucket] = deque()
        sizes = [sum(map(aligned, group)) * group[0].element_size() for group in groups]
        starts = [0, *accumulate(map(_pages, sizes))]
        largest_part = _part(max(sizes, default=0), memory.size)
        self.ring_bytes = max(_part(min(sum(sizes), WINDOW_BYTES), memory.size), largest_part)
        self._landing_start = starts[-1]
        self._cursor = 0
        self.everyone = memory.allocate(self._landing_start + (memory.size - 1) * self.ring_bytes)
        self.buckets = [PeerBucket(self, group, start) for group, start in zip(groups, starts, strict=False)]

    def landing(self, on_rank: int, of_rank: int, start: int, num_bytes: int) -> Tensor:
        """Where the bytes of one rank land on another; those of all ranks lie a ring apart."""
        ring = (of_rank - on_rank - 1) % self.memory.size
        start += self._landing_start + ring * self.ring_bytes
        return self.everyone[on_rank][start : start + num_bytes]

    def make_room(self, num_bytes: int) -> int:
        """A start in the rings for so many bytes, where nothing is under way any longer: the same on all ranks."""
        if self._cursor + num_bytes > self.ring_bytes:
            self._cursor = 0
        start, self._cursor = self._cursor, self._cursor + num_bytes
        while any(bucket.landing[0] < self._cursor and start < bucket.landing[1] for bucket in self.under_way):
            self.under_way.popleft().let_go()
        return start


class PeerBucket:
    """Gradients that travel together; used as buckets.Bucket is."""

    def __init__(self, line: PeerCopies, parameters: Sequence[nn.Parameter], start: int) -> None:
        self._line = line
        self._parameters = tuple(parameters)
        first = self._parameters[0]
        size = sum(map(aligned, self._parameters))
        num_bytes = size * first.element_size()
        self._buffers = [whole[start : start + num_bytes].view(first.dtype) for whole in line.everyone]
        self._averages = views_of(self._buffers[line.memory.rank], self._parameters)
        self._part_bytes = _part(num_bytes, line.memory.size)
        part = self._part_bytes // first.element_size()
        self._bounds = [(min(rank * part, size), min((rank + 1) * part, size)) for rank in range(line.memory.size)]
        self._pieces = [_overlaps(self._parameters, *bounds) for bounds in self._bounds]
        self._sources: list[Tensor] = []
        self.landing = (0, 0)
        """Of the last launch, in the rings."""
        self._sent: Any = None
        self._reduced: Any = None
        self._arrived: Any = None

    def launch(self, gradients: Sequence[Tensor | None]) -> None:
        """Start to average these over ranks; None counts as zero. The gradients are the bucket's from here on."""
        line, half = self._line, self._line.memory.num_channels // 2
        start = line.make_room(self._part_bytes)
        self.landing = start, start + self._part_bytes
        self._sources = [
            self._source(*given) for given in zip(gradients, self._averages, self._parameters, strict=True)
        ]
        ready = line.module.current_stream().record_event()
        channel = line.num_launched % half
        self._send(ready, channel)
        self._reduce(ready, channel)
        self._return(half + channel)
        line.num_launched += 1
        line.under_way.append(self)

    def wait(self) -> list[Tensor]:
        """The averages, each shaped as its parameter; of what was launched last."""
        if self._arrived is not None:
            self._line.module.current_stream().wait_event(self._arrived)
        return self._averages

    def add(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The averages, with gradients that came too late for the launch added: what to launch next."""
        for average, gradient in zip(self.wait(), gradients, strict=True):
            if gradient is not None:
                average.add_(gradient)
        return self._averages

    def release(self) -> None:
        """Hold on to no gradient that is not in the bucket's own memory."""
        if self in self._line.under_way:
            self._line.under_way.remove(self)
        self.let_go()

    def let_go(self) -> None:
        """Make the current stream wait until the gradients have been read, and drop them."""
        if self._sources:
            current = self._line.module.current_stream()
            for read in (self._sent, self._arrived):
                current.wait_event(read)
            self._sources = []

    def _landed(self, on_rank: int, of_rank: int) -> Tensor:
        """A rank's part of this bucket, as another sent it."""
        return self._line.landing(on_rank, of_rank, self.landing[0], self._part_bytes).view(self._averages[0].dtype)

    def _source(self, gradient: Tensor | None, average: Tensor, parameter: nn.Parameter) -> Tensor:
        """The gradient's elements in the order of the bucket."""
        if gradient is None:
            return flat(average.zero_())
        return flat(average if same(average, gradient) else dense(gradient, parameter))

    def _send(self, ready: Any, channel: int) -> None:
        line, rank = self._line, self._line.memory.rank
        with line.module.stream(line.outward):
            line.outward.wait_event(ready)
            for peer in line.peers:
                landing = self._landed(peer, rank)
                begin = self._bounds[peer][0]
                for piece in self._pieces[peer]:
                    source = self._sources[piece.index][piece.first : piece.first + piece.count]
                    landing[piece.place - begin : piece.place - begin + piece.count].copy_(source, non_blocking=True)
                line.memory.signal(peer, channel)
            self._sent = line.outward.record_event()

    def _reduce(self, ready: Any, channel: int) -> None:
        line, rank = self._line, self._line.memory.rank
        buffer, begin = self._buffers[rank], self._bounds[rank][0]
        with line.module.stream(line.reducing):
            line.reducing.wait_event(ready)
            for peer in line.peers:
                line.memory.await_signal(peer, channel)
            landed = [self._landed(rank, peer) for peer in line.peers]
            for piece in self._pieces[rank]:
                first, end = piece.place - begin, piece.place - begin + piece.count
                mean_into(
                    buffer[piece.place : piece.place + piece.count],
                    self._sources[piece.index][piece.first : piece.first + piece.count],
                    [gradient[first:end] for gradient in landed],
                )
            self._reduced = line.reducing.record_event()

    def _return(self, channel: int) -> None:
        line, rank = self._line, self._line.memory.rank
        begin, end = self._bounds[rank]
        with line.module.stream(line.homeward):
            line.homeward.wait_event(self._reduced)
            for peer in line.peers:
                self._buffers[peer][begin:end].copy_(self._buffers[rank][begin:end], non_blocking=True)
                line.memory.signal(peer, channel)
        with line.module.stream(line.arriving):
            line.arriving.wait_event(self._reduced)
            for peer in line.peers:
                line.memory.await_signal(peer, channel)
            self._arrived = line.arriving.record_event()


def _pages(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // _PAGE) * _PAGE


def _part(num_bytes: int, size: int) -> int:
    """Bytes of a rank's part of a bucket, whole pages; the last rank's may be less, and of a small bucket nothing."""
    return _pages(-(-num_bytes // size))


def _overlaps(parameters: Sequence[nn.Parameter], begin: int, end: int) -> list[_Piece]:
    """The pieces of gradients between two places of a bucket."""
    pieces, start = [], 0
    for index, parameter in enumerate(parameters):
        first, last = max(start, begin), min(start + parameter.numel(), end)
        if first < last:
            pieces.append(_Piece(index, first - start, first, last - first))
        start += aligned(parameter)
    return pieces
