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
    """Numbers that are averaged."""

    own: int
    """The address of this rank's numbers."""
    start_bytes: int
    """Where they begin in the target and in those of the others; a multiple of 16."""
    num_bytes: int
    """Their length."""


class PeerMemory(Protocol):
    """Operations of ranks that reach each other's memory; places in memory are addresses. Lines are 0 and 1.

    One call starts several operations together: the host is busy with a backward pass, and has no time for many small
    calls.
    """

    rank: int
    """This process's number, from 0."""
    size: int
    """The number of ranks."""
    device: torch.device
    """The device that has the memory."""

    def allocate(self, num_bytes: int, num_counters: int) -> tuple[Tensor, list[int]]:
        """Allocate as many bytes on every rank; returns this rank's (uint8, zero) and the address of each rank's.

        Also allocates so many counters, all zero, on every rank. Every rank calls it, once.
        """

    def follow_current(self, line: int) -> None:
        """The line's next work waits for everything that the current stream was given so far."""

    def follow_line(self, line: int, other: int) -> None:
        """The line's next work waits for everything that another line of this rank was given so far."""

    def current_awaits(self, counters: tuple[int, ...], value: int) -> None:
        """The current stream's next work waits until these counters of this rank are at least `value`."""

    def copy(self, line: int, targets: Sequence[int], sources: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        """Copy from address to address of any ranks, in any order; at least one byte each."""

    def mean(
        self, line: int, pieces: Sequence[Piece], target: int, others: int, distance_bytes: int, dtype: torch.dtype
    ) -> None:
        """Write target + start = (own + (others + start)) / size for each piece; own may be where its mean goes.

        The numbers of the others begin at `others`, `distance_bytes` apart. They are summed in float32 (float64 for
        float64), in this order.
        """

    def signal(self, line: int, places: tuple[tuple[int, int], ...], value: int) -> None:
        """Set these counters, each of a rank, when everything that the line was given is done and visible."""

    def await_signals(self, line: int, counters: tuple[int, ...], value: int) -> None:
        """The line's next work waits until these counters of this rank are at least `value`."""
