"""Where tensors lie in a buffer that has a slot for each owner, so that what a rank owns is one stretch of memory.

A collective that gathers or scatters all slots at once needs them to be equally long, and the shorter ones are padded
then; a collective an owner needs no padding. On GPUs one collective is worth it unless padding takes more than an
eighth of the tensors' own memory. On CPUs it is not: gloo's works in memory of its own (flat_parameters.py).

Tensors are given by their numbers of elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT_BYTES = 256
"""What torch's own allocators grant at least matters to kernels: vector loads, tensor cores, TMA, and CPU BLAS."""
MOST_PADDING = 1 / 8
"""Largest padding, as a share of the tensors' own bytes."""


@dataclass(frozen=True, slots=True)
class OwnerSlots:
    """Places in the buffer, in elements."""

    bounds: list[tuple[int, int]]
    """Where the slot of each owner begins and ends."""
    starts: list[int]
    """Where each tensor begins."""

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return self.bounds[-1][1]


def owner_slots(
    elements: Sequence[int], element_bytes: int, owners: Sequence[int], size: int, *, even: bool
) -> OwnerSlots:
    """Places for tensors of one dtype with these owners, ranks below `size`; `even`: all slots are equally long."""
    shares = shares_of(elements, element_bytes, owners, size)
    ends = list(accumulate([max(shares)] * size if even else shares))
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    free, starts = [begin for begin, _ in bounds], []
    for count, owner in zip(elements, owners, strict=True):
        starts.append(free[owner])
        free[owner] += _aligned(count, element_bytes)
    return OwnerSlots(bounds, starts)


def shares_of(elements: Sequence[int], element_bytes: int, owners: Sequence[int], size: int) -> list[int]:
    """The elements each owner's tensors take."""
    shares = [0] * size
    for count, owner in zip(elements, owners, strict=True):
        shares[owner] += _aligned(count, element_bytes)
    return shares


def worth_padding(shares: Sequence[int], device_type: str) -> bool:
    """Whether one collective for slots of these lengths is better than one an owner; see the head of this file."""
    return device_type != "cpu" and len(shares) * max(shares) <= (1 + MOST_PADDING) * sum(shares)


def _aligned(num_elements: int, element_bytes: int) -> int:
    """The elements a tensor takes in the buffer."""
    grain = max(1, ALIGNMENT_BYTES // element_bytes)
    return -(-num_elements // grain) * grain
