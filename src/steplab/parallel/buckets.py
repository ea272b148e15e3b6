"""The gradients that are sent together, and how they lie in a bucket's memory."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from steplab.parallel.grouping import aligned_bytes

Owners = Mapping[Tensor, int]
"""The rank that owns each parameter."""


def aligned(tensor: Tensor) -> int:
    """The number of elements that a gradient takes in a buffer, with the gap behind it."""
    return aligned_bytes(tensor.nbytes) // tensor.element_size()


class Bucket(Protocol):
    """Gradients that are sent together.

    Call `launch`, then `wait`, which returns the averages. Until the next launch the averages may be changed like any
    gradients, as they are the parameters' own.
    """

    @property
    def shared_bytes(self) -> int:
        """Memory outside of torch's allocator that all of this rank's buckets of the module hold together."""

    def launch(self, gradients: Sequence[Tensor | None]) -> None:
        """Start to average these over ranks; None counts as zero. From here on the gradients belong to the bucket."""

    def wait(self) -> Sequence[Tensor | None]:
        """The averages of the last launch, each shaped as its parameter; None for one that is on another rank alone,
        the owner of the parameter."""

    def add(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The averages plus gradients that came too late for the launch: what to launch next."""

    def release(self) -> None:
        """Drop references to gradients that are not in the bucket's own memory."""


def views_of(buffer: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Each parameter's place in a buffer, shaped as the parameter."""
    views, start = [], 0
    for parameter in parameters:
        views.append(buffer.as_strided(parameter.size(), layout_of(parameter), buffer.storage_offset() + start))
        start += aligned(parameter)
    return views


def fill(targets: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients to their targets, unless they are there already."""
    moved = [
        (target, gradient)
        for target, gradient in zip(targets, gradients, strict=True)
        if gradient is not None and not same(target, gradient)
    ]
    if moved:
        torch._foreach_copy_([target for target, _ in moved], [gradient for _, gradient in moved])
    absent = [target for target, gradient in zip(targets, gradients, strict=True) if gradient is None]
    if absent:
        torch._foreach_zero_(absent)


def with_late(averages: Sequence[Tensor | None], gradients: Sequence[Tensor | None], size: int) -> list[Tensor | None]:
    """The averages plus gradients that came too late, where each average is on its owner alone: what to launch next.

    Only the owner has the average, so it is multiplied by the number of ranks, `size`.
    """
    found: list[Tensor | None] = []
    for average, gradient in zip(averages, gradients, strict=True):
        if average is None:
            found.append(gradient)
        else:
            average.mul_(size)
            found.append(average if gradient is None else average.add_(gradient))
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride())


def layout_of(parameter: Tensor) -> tuple[int, ...]:
    """The strides of its gradient: its own if it fills its memory without gaps, as optimizers are fastest on equal
    strides.

    To be computed once, outside of the backward pass: it takes longer than launching a copy.
    """
    if fills_its_memory(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each once, in any order."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_shared(gradient: Tensor) -> bool:
    """Whether a gradient that autograd has just made may lie in memory with other users.

    Autograd does not copy a gradient that is a view: with `h + p[None]`, p's gradient lies in the memory of h's, which
    the backward pass has still to read. Only the number of references to the memory shows that.
    """
    return _references(gradient) > references_of_its_own()


def _references(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def references_of_its_own() -> int:
    """The number of references to the memory of an unshared gradient when its hooks run, which depends on torch.

    The first call has to be outside of a backward pass, because it runs one.
    """
    found: list[int] = []
    with torch.enable_grad():
        parameter = torch.zeros(1, requires_grad=True)
        parameter.register_post_accumulate_grad_hook(lambda of: found.append(_references(of.grad)))
        (parameter * 2).backward()
    return found[0]


def dense(gradient: Tensor | None, parameter: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The gradient itself if it has these strides and the parameter's dtype, else a copy that has them."""
    if gradient is not None and gradient.stride() == strides and gradient.dtype == parameter.dtype:
        return gradient
    made = torch.empty_strided(parameter.size(), strides, dtype=parameter.dtype, device=parameter.device)
    return made.zero_() if gradient is None else made.copy_(gradient)


def flat(tensor: Tensor) -> Tensor:
    """All elements of a tensor that fills its memory, in the order in which they lie there."""
    return tensor.as_strided((tensor.numel(),), (1,))
