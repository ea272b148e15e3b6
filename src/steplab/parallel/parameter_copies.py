"""Updated parameters that owners copy into the other ranks' buffers, with no collective.

The buffers of all parameters lie in memory that all ranks reach, at the same places. After its update each rank tells
the others that it reads the old parameters no longer, and once all of them have told so, copies what it owns into
theirs, buffer by buffer, in the order in which the next forward pass reads them; the copy engines move it, under that
pass. Behind each buffer it tells them that its part is there.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from steplab.parallel.peer_memory import PeerMemory
from steplab.parallel.peer_parts import NUM_COUNTERS, pages

_LINE = 0


class ParameterCopies:
    """The buffers of some parameters, and what is on its way between them."""

    def __init__(self, memory: PeerMemory, sizes_bytes: Sequence[int]) -> None:
        """Buffers of so many bytes each, the same on all ranks; a collective call."""
        self._memory = memory
        self._sizes = tuple(sizes_bytes)
        *self._starts, end = [0, *accumulate(pages(size) for size in sizes_bytes)]
        self._gpu = memory.device.index if memory.device.type == "cuda" else -1  # a negative number is no device
        with torch.cuda.device(self._gpu):
            self._own, self._bases = memory.allocate(end, NUM_COUNTERS * memory.size)
        rank, everyone = memory.rank, range(memory.size)
        # From the next rank on: in any order that all ranks share, all would copy to one of them first.
        self._peers = [(rank + step) % memory.size for step in range(1, memory.size)]
        self._done_reading = tuple(2 * peer for peer in self._peers)
        self._arrived = tuple(2 * other + 1 for other in everyone)
        self._tell_done_reading = tuple((peer, 2 * rank) for peer in self._peers)
        self._tell_arrived = tuple((other, 2 * rank + 1) for other in everyone)
        self._num_exchanges = self._num_copied = 0

    @property
    def shared_bytes(self) -> int:
        """Memory outside of torch's allocator."""
        return self._own.untyped_storage().nbytes()

    def buffer(self, place: int) -> Tensor:
        """This rank's buffer of that number, in bytes."""
        return self._own[self._starts[place] : self._starts[place] + self._sizes[place]]

    def begin(self) -> None:
        """What is started next waits until all ranks have come here: then none reads the old parameters."""
        self._num_exchanges += 1
        with torch.cuda.device(self._gpu):
            self._memory.follow_current(_LINE)
            self._memory.signal(_LINE, self._tell_done_reading, self._num_exchanges)
            self._memory.await_signals(_LINE, self._done_reading, self._num_exchanges)

    def start(self, place: int, begin_bytes: int, num_bytes: int) -> "ArrivingCopies":
        """Copy this part of this rank's buffer to all others; all ranks start the same buffers in one order."""
        self._num_copied += 1
        begin, count = self._starts[place] + begin_bytes, len(self._peers)
        targets = [self._bases[peer] + begin for peer in self._peers]
        source = self._bases[self._memory.rank] + begin
        with torch.cuda.device(self._gpu):
            if num_bytes:
                self._memory.copy(_LINE, targets, [source] * count, [num_bytes] * count)
            self._memory.signal(_LINE, self._tell_arrived, self._num_copied)
        return ArrivingCopies(self, self._num_copied)

    def wait(self, number: int) -> None:
        """What the current stream is given next comes when so many buffers have been copied on all ranks."""
        with torch.cuda.device(self._gpu):
            self._memory.current_awaits(self._arrived, number)


class ArrivingCopies:
    """The parts of one buffer on their way from all ranks."""

    def __init__(self, copies: ParameterCopies, number: int) -> None:
        self._copies, self._number = copies, number

    def wait(self) -> None:
        """What the current stream is given next finds all parts there, and this rank's own sent."""
        self._copies.wait(self._number)
