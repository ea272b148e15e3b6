"""Buckets of gradients that are averaged over ranks together.

A `CollectiveBucket` is averaged everywhere by one all-reduce, in a flat buffer; a single gradient is reduced in
autograd's own memory.

An `OwnedBucket` is averaged on its parameters' owners: by one reduce-scatter if equal slots need little padding, else
by a reduce per owner (sizes.py).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from .collectives import Collectives, Pending
from .errors import Unsupported
from .sizes import aligned_bytes, owner_slots, shares_of, worth_padding

Owners = Mapping[Tensor, int]


def aligned(tensor: Tensor) -> int:
    return aligned_bytes(tensor.nbytes) // tensor.element_size()


class Bucket(Protocol):
    """Gradients that are averaged together. Averages may be changed in place until the next launch."""

    @property
    def shared_bytes(self) -> int:
        """Bytes that all buckets of the module hold outside torch's allocator."""

    def launch(self, gradients: Sequence[Tensor | None]) -> None:
        """Start averaging; None counts as zero. The caller must no longer use the gradients."""

    def wait(self) -> Sequence[Tensor | None]:
        """Wait for the averages, each shaped as its parameter; None for parameters that other ranks own."""

    def release(self) -> None:
        """Drop references to gradients that lie outside the bucket's memory."""


def views_of(buffer: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    views, start = [], 0
    for parameter in parameters:
        views.append(buffer.as_strided(parameter.size(), layout_of(parameter), buffer.storage_offset() + start))
        start += aligned(parameter)
    return views


def fill(targets: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients into `targets`, unless they already are there; None becomes zero."""
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
    """Add gradients that came after averaging to the averages, to average the sums again. Averages are first multiplied
    by `size`: the number of ranks if only owners have them, since the other ranks then add nothing, else 1.
    """
    found: list[Tensor | None] = []
    for average, gradient in zip(averages, gradients, strict=True):
        if average is not None:
            average.mul_(size)
            gradient = average if gradient is None else average.add_(gradient)
        found.append(gradient)
    return found


def same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride())


def layout_of(parameter: Tensor) -> tuple[int, ...]:
    """Strides for the parameter's gradient: optimizers are fastest on equal ones. Too slow for backward passes."""
    if fills_its_memory(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def fills_its_memory(tensor: Tensor) -> bool:
    """True if the tensor has no gaps and no repeated elements, in any order of dimensions."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_shared(gradient: Tensor) -> bool:
    """True if autograd may still read a new gradient's memory: in `h + p[None]`, p's gradient is a view of h's. Only
    the storage's reference count shows it.
    """
    return _references(gradient) > references_of_its_own()


def _references(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def references_of_its_own() -> int:
    """Reference count of an unshared gradient's storage in a hook, for this torch version. The first call runs a
    backward pass.
    """
    found: list[int] = []
    with torch.enable_grad():
        parameter = torch.zeros(1, requires_grad=True)
        parameter.register_post_accumulate_grad_hook(lambda of: found.append(_references(of.grad)))
        (parameter * 2).backward()
    return found[0]


def dense(gradient: Tensor | None, parameter: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The gradient in the parameter's dtype with these strides, copied only if necessary; zeros for None."""
    if gradient is not None and gradient.stride() == strides and gradient.dtype == parameter.dtype:
        return gradient
    made = torch.empty_strided(parameter.size(), strides, dtype=parameter.dtype, device=parameter.device)
    return made.zero_() if gradient is None else made.copy_(gradient)


class CollectiveBucket:
    shared_bytes = 0

    def __init__(self, parameters: Sequence[nn.Parameter], collectives: Collectives) -> None:
        self._collectives, self._first = collectives, parameters[0]
        alone = len(parameters) == 1
        size = self._first.numel() if alone else sum(map(aligned, parameters))
        if alone:
            references_of_its_own()
        self._strides = layout_of(self._first)
        self._buffer = None if alone else self._first.new_zeros(size, requires_grad=False)
        self._averages = [] if self._buffer is None else views_of(self._buffer, parameters)
        self._pending: Pending | None = None

    def launch(self, gradients: Sequence[Tensor | None]) -> None:
        buffer = self._buffer
        if buffer is None:
            (gradient,) = gradients
            if gradient is not None and is_shared(gradient):
                gradient = gradient.clone()
            self._averages = [dense(gradient, self._first, self._strides).detach()]
            buffer = self._averages[0].as_strided((self._first.numel(),), (1,))
            gradients = self._averages
        fill(self._averages, gradients)
        self._pending = self._collectives.all_reduce(buffer, average=True)

    def wait(self) -> list[Tensor]:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._averages

    def release(self) -> None:
        if self._buffer is None:
            self._averages = []


class OwnedBucket:
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
        for pending in self._pending:
            pending.wait()
        self._pending = []
        return self._averages

    def release(self) -> None:
        """Nothing to drop: gradients lie in the bucket's buffer."""


_ALL = "gradients with all their elements"


def refuse_sparse(module: nn.Module, doing: str, holders: str) -> None:
    """Raise Unsupported for an embedding with sparse gradients. `doing` and `holders` are words of the message."""
    for name, inner in module.named_modules():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse:
            what, why = f"{doing} of {name or 'a module'} with sparse gradients", f"{holders} hold {_ALL}"
            raise Unsupported(what, why, "build the embedding with sparse=False")


def refuse_sparse_gradient(name: str, gradient: Tensor) -> None:
    """Raise Unsupported for a sparse gradient, such as torch.nn.functional.embedding's."""
    if gradient.layout is not torch.strided:
        what = f"data parallelism with a sparse gradient of {name}"
        raise Unsupported(what, f"buckets hold {_ALL}", "use sparse=False")
