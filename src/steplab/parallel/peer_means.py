"""Means of this rank's gradients and those that landed beside its bucket: one kernel launch for several."""

from collections.abc import Sequence
from typing import Any

import torch

from steplab.parallel.peer_memory import Piece

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
        from steplab.parallel.mean_kernel import mean_kernel

        # A launch through Triton's own way finds out what to compile for: places and sizes of 64 bits, and numbers that
        # are multiples of nothing. They count less than nothing, so that nothing is done.
        numbers = torch.zeros(32, dtype=dtype, device=self._device)[0 if aligned else 1 :]
        arguments = (numbers,) * PIECES, (_WIDE,) * PIECES, (-_WIDE,) * PIECES
        compiled = mean_kernel[(1,)](numbers, numbers, 1 << 40, *arguments, OTHERS=self._num_others, BLOCK=BLOCK)
        self._compiled[dtype, aligned] = compiled
        return compiled


def mean_arguments(pieces: Sequence[Piece], dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The kernel's arguments for up to PIECES pieces, and the number of programs that they need."""
    missing = [0] * (PIECES - len(pieces))
    owns = (*[piece.own for piece in pieces], *missing)
    starts = (*[piece.start_bytes // UNIT_BYTES for piece in pieces], *missing)
    counts = (*[piece.num_bytes // dtype.itemsize for piece in pieces], *missing)
    return (owns, starts, counts), sum(-(-count // BLOCK) for count in counts)
