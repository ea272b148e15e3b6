"""The kernel that averages what peers sent, in Triton's interpreter, against sums in float64."""

import os

import pytest
import torch
from torch import Tensor

from steplab.parallel.peer_means import BLOCK, PIECES, UNIT_BYTES, mean_arguments
from steplab.parallel.peer_memory import Piece

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]
SIZES = [BLOCK + 904, BLOCK, 1, 2 * BLOCK, 17, BLOCK + 1, 3 * BLOCK, 3]


@pytest.mark.parametrize("num_pieces", [1, 3, PIECES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_piece_is_averaged_where_it_belongs_and_nothing_else_is_written(
    num_pieces: int, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    from steplab.parallel.mean_kernel import mean_kernel

    torch.manual_seed(0)
    unit = UNIT_BYTES // dtype.itemsize
    pieces, own, place = [], [], 0
    for size in SIZES[:num_pieces]:
        own.append(torch.randn(size, dtype=dtype))
        pieces.append(Piece(own[-1].data_ptr(), place * dtype.itemsize, size * dtype.itemsize))
        place = -(-(place + size) // unit) * unit
    distance = place + 64
    rows = torch.randn(2, distance, dtype=dtype)
    target = torch.full((place,), 7.0, dtype=dtype)
    (_, starts, counts), programs = mean_arguments(pieces, dtype)
    pointers = (*own, *[target] * (PIECES - num_pieces))  # the interpreter takes tensors, not addresses
    mean_kernel[(programs,)](target, rows, distance, pointers, starts, counts, OTHERS=2, BLOCK=BLOCK)
    expected = torch.full((place,), 7.0, dtype=torch.float64)
    for piece, mine in zip(pieces, own, strict=True):
        begin = piece.start_bytes // dtype.itemsize
        expected[begin : begin + len(mine)] = mean_of(mine, *rows[:, begin : begin + len(mine)])
    one_rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(target.double(), expected, rtol=one_rounding, atol=one_rounding)


def mean_of(*rows: Tensor) -> Tensor:
    return torch.stack([row.double() for row in rows]).mean(0)
