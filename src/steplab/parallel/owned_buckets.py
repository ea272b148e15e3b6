"""Buckets whose gradients are averaged on the ranks that own their parameters, and nowhere else; by collectives.

A bucket is one flat buffer with a slot for each owner. Where the slots can be made equally long without much padding,
one reduce-scatter serves them all; else there is a reduce for each owner (owner_slots.py). Either way a rank sends
(N - 1) / N of the bytes at the least, half of what an all-reduce does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steplab.parallel.buckets import fill, layout_of, with_late
from steplab.parallel.collectives import Collectives, Pending
from steplab.parallel.owner_slots import owner_slots, shares_of, worth_padding


class OwnedBucket:
    """Gradients that travel together to their owners; see buckets.Bucket."""

    shared_bytes = 0

    def __init__(self, parameters: Sequence[nn.Parameter], owners: Sequence[int], collectives: Collectives) -> None:
        self._collectives = collectives
        first, size = parameters[0], collectives.size
        elements, width = [parameter.numel() for parameter in parameters], first.element_size()
        self._scatters = worth_padding(shares_of(elements, width, owners, size), first.device.type)
        slots = owner_slots(elements, width, owners, size, even=self._scatters)
        self._buffer = torch.zeros(slots.size, dtype=first.dtype, device=first.device)
        self._bounds = slots.bounds
        self._places = [
            self._buffer.as_strided(parameter.size(), layout_of(parameter), start)
            for parameter, start in zip(parameters, slots.starts, strict=True)
        ]
        mine = [owner == collectives.rank for owner in owners]
        self._averages = [place if own else None for place, own in zip(self._places, mine, strict=True)]
        self._pending: list[Pending] = []

    def launch(self, gradients: Sequence[Tensor | None]) -> None:
        """Start to average these on their owners; None counts as zero."""
        fill(self._places, gradients)
        if self._scatters:
            begin, end = self._bounds[self._collectives.rank]
            self._pending = [self._collectives.reduce_scatter(self._buffer[begin:end], self._buffer, average=True)]
        else:
            self._pending = [
                self._collectives.reduce(self._buffer[begin:end], destination=owner, average=True)
                for owner, (begin, end) in enumerate(self._bounds)
                if begin < end
            ]

    def wait(self) -> list[Tensor | None]:
        """The averages of what this rank owns, each shaped as its parameter; of what was launched last."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        return self._averages

    def add(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What to launch next so that gradients count as well that came too late for the launch."""
        return with_late(self.wait(), gradients, self._collectives.size)

    def release(self) -> None:
        """All lie in the bucket's own memory."""
