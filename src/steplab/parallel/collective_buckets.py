"""Buckets that are averaged by a collective: one all-reduce of their memory.

A bucket of several gradients is one flat buffer, of which they are views: the collective reduces what the optimizer
reads, and nothing is copied out. A gradient that autograd made elsewhere is copied in once, all of a bucket in one
call; one that already lies there, because it was zeroed and not dropped, is not copied.

A bucket of one gradient needs no buffer: the tensor that autograd made is reduced in place. So a gradient larger than
the bucket size, which in a Transformer is most of the bytes, is never copied, unless autograd uses its memory for
something else as well.

With compression a bucket has a second buffer, of the smaller dtype, which is sent instead: gradients are cast on their
way in, and the averages on their way back into the first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steplab.parallel.buckets import (
    aligned,
    dense,
    fill,
    flat,
    is_shared,
    layout_of,
    references_of_its_own,
    views_of,
)
from steplab.parallel.collectives import Collectives, Pending

COMPRESSED_DTYPES = (torch.float32, torch.float64)


class CollectiveBucket:
    """Gradients that are reduced by one collective; see buckets.Bucket."""

    shared_bytes = 0

    def __init__(
        self, parameters: Sequence[nn.Parameter], wire_dtype: torch.dtype | None, collectives: Collectives
    ) -> None:
        self._collectives = collectives
        self._parameters = tuple(parameters)
        first = self._parameters[0]
        compressed = wire_dtype is not None and first.dtype in COMPRESSED_DTYPES
        self._buffer: Tensor | None = None
        self._averages: list[Tensor] = []
        self._strides = layout_of(first)
        alone = len(self._parameters) == 1
        if alone:
            references_of_its_own()
        else:
            size = sum(map(aligned, self._parameters))
            self._buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
            self._averages = views_of(self._buffer, self._parameters)
        self._wire: Tensor | None = None
        self._wire_views: list[Tensor] = []
        if compressed:
            size = first.numel() if alone else sum(map(aligned, self._parameters))
            self._wire = torch.zeros(size, dtype=wire_dtype, device=first.device)
            self._wire_views = views_of(self._wire, self._parameters)
        self._pending: Pending | None = None

    def launch(self, gradients: Sequence[Tensor | None]) -> None:
        """Start to average these over ranks; None counts as zero. From here on the gradients belong to the bucket."""
        buffer = self._buffer
        if buffer is None:
            (gradient,) = gradients
            if gradient is not None and is_shared(gradient):
                gradient = gradient.clone()
            self._averages = [dense(gradient, self._parameters[0], self._strides).detach()]
            buffer = flat(self._averages[0])
            gradients = self._averages
        if self._wire is None:
            fill(self._averages, gradients)
            self._pending = self._collectives.all_reduce(buffer, average=True)
        else:
            fill(self._wire_views, gradients)
            self._pending = self._collectives.all_reduce(self._wire, average=True, into=buffer)

    def wait(self) -> list[Tensor]:
        """The averages of the last launch, each shaped as its parameter."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._averages

    def add(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The averages plus gradients that came too late for the launch: what to launch next."""
        for average, gradient in zip(self.wait(), gradients, strict=True):
            if gradient is not None:
                average.add_(gradient)
        return self._averages

    def release(self) -> None:
        """Drop references to gradients that are not in the bucket's own memory."""
        if self._buffer is None:
            self._averages = []
