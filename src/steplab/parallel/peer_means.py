"""Means of this rank's gradients and those that landed beside its bucket: one kernel launch for several.

Each row of numbers is read once and the mean written once.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .peer_memory import Piece

BLOCK = 4096
"""The numbers that one program averages."""
PIECES = 8
"""The most pieces of a launch."""
UNIT_BYTES = 16
"""Pieces begin at multiples of this; they are given in these units, so that the compiler knows the alignment."""
_WIDE = (1 << 40) + 3
"""A number that does not fit into 32 bits."""


class Means:
    """The kernel, compiled for its arguments."""

    def __init__(self, device: torch.device, num_others: int) -> None:
        self._device, self._num_others = device, num_others
        self._compiled: dict[Any, Any] = {}

    def start(
        self, stream: int, pieces: Sequence[Piece], target: int, others: int, distance_bytes: int, dtype: torch.dtype
    ) -> None:
        """See peer_memory.PeerMemory.mean."""
        places = target, others, distance_bytes, *[piece.own for piece in pieces]
        kind = dtype, not any(place % UNIT_BYTES for place in places)
        compiled = self._compiled.get(kind) or self._compile(*kind)
        distance = distance_bytes // dtype.itemsize
        for begin in range(0, len(pieces), PIECES):
            arguments, programs = mean_arguments(pieces[begin : begin + PIECES], dtype)
            compiled[(programs, 1, 1)](target, others, distance, *arguments, self._num_others, BLOCK, stream=stream)

    def _compile(self, dtype: torch.dtype, aligned: bool) -> Any:
        """The kernel for numbers of a type; `aligned` says whether all of them begin at multiples of 16 bytes."""
        # A launch through Triton's own way finds out what to compile for: places and sizes of 64 bits, and numbers that
        # are multiples of nothing. They count less than nothing, so that nothing is done.
        numbers = torch.zeros(32, dtype=dtype, device=self._device)[0 if aligned else 1 :]
        arguments = (numbers,) * PIECES, (_WIDE,) * PIECES, (-_WIDE,) * PIECES
        compiled = mean_kernel[(1,)](
            numbers, numbers, 1 << 40, *arguments, OTHERS=self._num_others, BLOCK=BLOCK, enable_fp_fusion=True
        )
        self._compiled[dtype, aligned] = compiled
        return compiled


def mean_arguments(pieces: Sequence[Piece], dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The kernel's arguments for up to PIECES pieces, and the number of programs that they need."""
    missing = [0] * (PIECES - len(pieces))
    owns = (*[piece.own for piece in pieces], *missing)
    starts = (*[piece.start_bytes // UNIT_BYTES for piece in pieces], *missing)
    counts = (*[piece.num_bytes // dtype.itemsize for piece in pieces], *missing)
    return (owns, starts, counts), sum(-(-count // BLOCK) for count in counts)


@triton.jit(do_not_specialize=["distance", "starts", "counts"])
def mean_kernel(target_ptr, others_ptr, distance, own_ptrs, starts, counts, OTHERS: tl.constexpr, BLOCK: tl.constexpr):
    """target = (own + each of OTHERS rows, `distance` numbers apart) / (OTHERS + 1), summed in float32 at least.

    Of each piece at its start, in units of 16 bytes; a program makes a block of one of them. Places are counted in 64
    bits: a piece may have more than 2^31 numbers, and one that has almost as many would exceed them when rounded up.
    """
    block, own_ptr = tl.program_id(0).to(tl.int64), own_ptrs[0]
    start, count = starts[0].to(tl.int64), counts[0].to(tl.int64)
    blocks = tl.cdiv(count, BLOCK)
    for i in tl.static_range(1, len(own_ptrs)):
        further = block >= blocks
        block -= tl.where(further, blocks, 0)
        own_ptr, start, count = (
            tl.where(further, own_ptrs[i], own_ptr),
            tl.where(further, starts[i], start),
            tl.where(further, counts[i], count),
        )
        blocks = tl.cdiv(count, BLOCK)
    first = block * BLOCK
    unit: tl.constexpr = 16 // (target_ptr.dtype.element_ty.primitive_bitwidth // 8)
    skipped = start * unit + first
    if first + BLOCK <= count:
        _mean(target_ptr + skipped, own_ptr + first, others_ptr + skipped, distance, BLOCK, OTHERS, BLOCK)
    else:
        _mean(target_ptr + skipped, own_ptr + first, others_ptr + skipped, distance, count - first, OTHERS, BLOCK)


@triton.jit
def _mean(target_ptr, own_ptr, others_ptr, distance, count, OTHERS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the mean of one block's first `count` numbers; with a constant count the compiler removes the mask."""
    places = tl.arange(0, BLOCK)
    inside = places < count
    total = tl.load(own_ptr + places, mask=inside, other=0.0)
    if total.dtype != tl.float64:
        total = total.to(tl.float32)
    for row in tl.static_range(OTHERS):
        total += tl.load(others_ptr + row * distance.to(tl.int64) + places, mask=inside, other=0.0).to(total.dtype)
    tl.store(target_ptr + places, (total / (OTHERS + 1)).to(target_ptr.dtype.element_ty), mask=inside)
