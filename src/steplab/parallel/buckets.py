"""Which gradients travel together, and the memory they travel in.

A bucket of several gradients is one flat buffer, of which they are views: what the collective reduces is what the
optimizer reads, and nothing is copied out. A gradient that autograd made elsewhere is copied in once, all of a bucket
in one call; one that already lives there, because it was zeroed and not dropped, is not copied at all.

A bucket of one gradient needs no buffer: the tensor that autograd made is reduced where it was born. So every gradient
larger than the bucket size, which in a Transformer is most of the bytes, is never copied.

In a buffer each gradient begins at a multiple of 16 bytes, so that vectorised optimizers can read it; the gaps are zero
and travel along.

With compression a bucket has a second buffer, of the smaller dtype, which travels instead: gradients are cast on their
way in, and the averages on their way back into the first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steplab.parallel.collectives import Collectives, Pending

ALIGNMENT_BYTES = 16
COMPRESSED_DTYPES = (torch.float32, torch.float64)


def assign(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> list[list[int]]:
    """Groups of indices into `parameters`, which are in order of readiness; every parameter is in one group.

    The parameters of a group have one dtype and device; groups are in the order in which they become complete.
    """
    closed: list[list[int]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, parameter in enumerate(parameters):
        kind = parameter.dtype, parameter.device
        size = aligned(parameter) * parameter.element_size()
        if kind in open_groups and filled[kind] + size > bucket_bytes:
            closed.append(open_groups.pop(kind))
        if kind not in open_groups:
            open_groups[kind], filled[kind] = [], 0
        open_groups[kind].append(index)
        filled[kind] += size
    return sorted([*closed, *open_groups.values()], key=lambda group: group[-1])


def aligned(parameter: Tensor) -> int:
    """How many elements a gradient takes in a buffer, with the gap behind it."""
    unit = max(ALIGNMENT_BYTES // parameter.element_size(), 1)
    return -(-parameter.numel() // unit) * unit


class Bucket:
    """Gradients that are reduced by one collective.

    `launch`, then `wait`, which gives the averages; before the next launch all may be done to the averages that is done
    to gradients, as they are the parameters' own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], wire_dtype: torch.dtype | None) -> None:
        self._parameters = tuple(parameters)
        first = self._parameters[0]
        compressed = wire_dtype is not None and first.dtype in COMPRESSED_DTYPES
        self._buffer: Tensor | None = None
        self._averages: list[Tensor] = []
        alone = len(self._parameters) == 1
        if not alone:
            size = sum(map(aligned, self._parameters))
            self._buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
            self._averages = self._views(self._buffer)
        self._wire: Tensor | None = None
        self._wire_views: list[Tensor] = []
        if compressed:
            size = first.numel() if alone else sum(map(aligned, self._parameters))
            self._wire = torch.zeros(size, dtype=wire_dtype, device=first.device)
            self._wire_views = self._views(self._wire)
        self._pending: Pending | None = None

    def launch(self, collectives: Collectives, gradients: Sequence[Tensor | None]) -> None:
        """Start to average these over ranks; None counts as zero. The gradients are the bucket's from here on."""
        buffer = self._buffer
        if buffer is None:
            self._averages = [_dense(gradients[0], self._parameters[0])]
            buffer = _flat(self._averages[0])
            gradients = self._averages
        if self._wire is None:
            _fill(self._averages, gradients)
            self._pending = collectives.all_reduce(buffer, average=True)
        else:
            _fill(self._wire_views, gradients)
            self._pending = collectives.all_reduce(self._wire, average=True, into=buffer)

    def wait(self) -> list[Tensor]:
        """The averages, each shaped as its parameter; of what was launched last."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._averages

    def add(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The averages, with gradients that came too late for the launch added: what to launch next."""
        for average, gradient in zip(self.wait(), gradients, strict=True):
            if gradient is not None:
                average.add_(gradient)
        return self._averages

    def release(self) -> None:
        """Hold on to no gradient that is not in the bucket's own memory."""
        if self._buffer is None:
            self._averages = []

    def _views(self, buffer: Tensor) -> list[Tensor]:
        views, start = [], 0
        for parameter in self._parameters:
            views.append(buffer.as_strided(parameter.size(), _strides(parameter), start))
            start += aligned(parameter)
        return views


def _fill(targets: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients to their targets, where they are not there yet."""
    moved = [
        (target, gradient)
        for target, gradient in zip(targets, gradients, strict=True)
        if gradient is not None and not _same(target, gradient)
    ]
    if moved:
        torch._foreach_copy_([target for target, _ in moved], [gradient for _, gradient in moved])
    absent = [target for target, gradient in zip(targets, gradients, strict=True) if gradient is None]
    if absent:
        torch._foreach_zero_(absent)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride())


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Those of the parameter where it fills its memory without gaps, as optimizers are fastest on equal layouts."""
    if _fills_its_memory(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether its elements are all of a stretch of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """The gradient itself where its layout and dtype are the parameter's, else a copy that has them."""
    strides = _strides(parameter)
    if gradient is not None and gradient.stride() == strides and gradient.dtype == parameter.dtype:
        return gradient.detach()
    dense = torch.empty_strided(parameter.size(), strides, dtype=parameter.dtype, device=parameter.device)
    return dense.zero_() if gradient is None else dense.copy_(gradient)


def _flat(tensor: Tensor) -> Tensor:
    """All elements of a tensor that fills its memory, in the order in which they lie there."""
    return tensor.as_strided((tensor.numel(),), (1,))
