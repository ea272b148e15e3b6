"""Which gradients travel together, and how they lie in a bucket's memory.

In a buffer each gradient begins at a multiple of 16 bytes, so that vectorised optimizers can read it; the gaps are zero
and travel along.
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 16


def grouped(parameters: Sequence[nn.Parameter], bucket_bytes: float) -> list[list[int]]:
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


class Bucket(Protocol):
    """Gradients that travel together.

    `launch`, then `wait`, which gives the averages; before the next launch all may be done to the averages that is done
    to gradients, as they are the parameters' own.
    """

    @property
    def shared_bytes(self) -> int:
        """Memory outside of torch's allocator that this rank's buckets of the module hold, all of them together."""

    def launch(self, gradients: Sequence[Tensor | None]) -> None:
        """Start to average these over ranks; None counts as zero. The gradients are the bucket's from here on."""

    def wait(self) -> list[Tensor]:
        """The averages, each shaped as its parameter; of what was launched last."""

    def add(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The averages, with gradients that came too late for the launch added: what to launch next."""

    def release(self) -> None:
        """Hold on to no gradient that is not in the bucket's own memory."""


def views_of(buffer: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Each parameter's place in a buffer, shaped as the parameter."""
    views, start = [], 0
    for parameter in parameters:
        views.append(buffer.as_strided(parameter.size(), layout_of(parameter), buffer.storage_offset() + start))
        start += aligned(parameter)
    return views


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride())


def layout_of(parameter: Tensor) -> tuple[int, ...]:
    """Strides of its gradient: its own where it fills its memory without gaps, as optimizers are fastest on equal ones.

    To be asked once, and not in the middle of backward: it takes longer than to start a copy.
    """
    if fills_its_memory(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether its elements are all of a stretch of memory, each once, in whatever order."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_shared(gradient: Tensor) -> bool:
    """Whether a gradient that autograd has just left may lie in memory that others use.

    Autograd does not copy a gradient that is a view: with `h + p[None]`, p's gradient lies in the memory of h's, which
    the backward pass has still to read. Nothing tells so but the number of references to the memory.
    """
    return _references(gradient) > references_of_its_own()


def _references(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def references_of_its_own() -> int:
    """Those to the memory of a gradient that nobody else uses, when the hooks for it run: torch's own business.

    To be asked first outside of a backward pass: it runs one.
    """
    found: list[int] = []
    with torch.enable_grad():
        parameter = torch.zeros(1, requires_grad=True)
        parameter.register_post_accumulate_grad_hook(lambda of: found.append(_references(of.grad)))
        (parameter * 2).backward()
    return found[0]


def dense(gradient: Tensor | None, parameter: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The gradient itself where it has these strides and the parameter's dtype, else a copy that has them."""
    if gradient is not None and gradient.stride() == strides and gradient.dtype == parameter.dtype:
        return gradient
    made = torch.empty_strided(parameter.size(), strides, dtype=parameter.dtype, device=parameter.device)
    return made.zero_() if gradient is None else made.copy_(gradient)


def flat(tensor: Tensor) -> Tensor:
    """All elements of a tensor that fills its memory, in the order in which they lie there."""
    return tensor.as_strided((tensor.numel(),), (1,))
