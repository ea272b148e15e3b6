"""Memory that the ranks of one host share, lines of work on it, and counters by which they wait for each other.

A *line* is a sequence of work beside that of the current stream: a stream of its own, of CUDA. A *counter* is a number
in every rank's memory that only grows. A line adds to the end of its work "set this counter of that rank", and another
waits, on the device, until a counter has got so far. So ranks, lines and streams are all told of each other's progress
in one way, and the host waits for none of them.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Numbers of which a mean is made."""

    own: int
    """Address of this rank's."""
    start_bytes: int
    """Where they begin in the target and in the others'; a multiple of 16."""
    num_bytes: int
    """How long they are."""


class PeerMemory(Protocol):
    """What ranks that reach each other's memory can do; places in memory are addresses. Lines are 0 and 1.

    What is given to it together is started together: the host is busy with a backward pass meanwhile, and has no time
    for many small calls.
    """

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

    def follow_current(self, line: int) -> None:
        """What the line is given next comes after all that the current stream was given so far."""

    def follow_line(self, line: int, other: int) -> None:
        """What the line is given next comes after all that another line of this rank's was given so far."""

    def current_awaits(self, counters: tuple[int, ...], value: int) -> None:
        """What the current stream is given next comes when these counters of this rank's are at least that."""

    def copy(self, line: int, targets: Sequence[int], sources: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        """From address to address, of whichever ranks, in any order; at least one byte each."""

    def mean(
        self, line: int, pieces: Sequence[Piece], target: int, others: int, distance_bytes: int, dtype: torch.dtype
    ) -> None:
        """target + start = (own + (others + start)) / size, for each piece; own may be where its mean goes.

        The others' begin at `others`, `distance_bytes` apart. Summed in float32 (float64 of float64), in this order.
        """

    def signal(self, line: int, places: tuple[tuple[int, int], ...], value: int) -> None:
        """When all that the line was given is done and can be seen, these counters, each of a rank, are set."""

    def await_signals(self, line: int, counters: tuple[int, ...], value: int) -> None:
        """What the line is given next comes when these counters of this rank's are at least that."""
