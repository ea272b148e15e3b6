"""Memory that the ranks of one host share, lines of work on it, and counters by which they wait for each other.

A *line* is a sequence of work beside that of the current stream: a stream of its own, of CUDA. A *counter* is a number
in every rank's memory that only grows. A line adds to the end of its work "set this counter of that rank", and another
waits, on the device, until a counter has got so far. So ranks, lines and streams are all told of each other's progress
in one way, and the host waits for none of them.
"""

from typing import Protocol

import torch
from torch import Tensor


class PeerMemory(Protocol):
    """What ranks that reach each other's memory can do; places in memory are addresses. Lines are 0, 1, and 2."""

    rank: int
    """This process's place, from 0."""
    size: int
    """How many ranks there are."""
    device: torch.device
    """Where the memory is."""

    def allocate(self, num_bytes: int, num_counters: int) -> tuple[Tensor, list[int]]:
        """As many bytes on every rank: this rank's (uint8, zero), and where each rank's begin. Every rank calls it.

        Also so many counters, all zero, on every rank. It is called once.
        """

    def follow_current(self, *lines: int) -> None:
        """What these lines are given next comes after all that the current stream was given so far."""

    def current_awaits(self, counter: int, value: int) -> None:
        """What the current stream is given next comes when this rank's counter is at least that."""

    def copy(self, line: int, target: int, source: int, num_bytes: int) -> None:
        """From address to address, of whichever ranks."""

    def mean(
        self, line: int, target: int, own: int, others: int, distance_bytes: int, count: int, dtype: torch.dtype
    ) -> None:
        """target = (own + others) / size, so many numbers of a type at each address; own may be target.

        The others' begin at `others`, `distance_bytes` apart. Summed in float32 (float64 of float64), in this order.
        """

    def signal(self, line: int, rank: int, counter: int, value: int) -> None:
        """When all that the line was given is done and can be seen, a rank's counter is set."""

    def await_signal(self, line: int, counter: int, value: int) -> None:
        """What the line is given next comes when this rank's counter is at least that."""
