import os
from typing import Any

import pytest
import torch
from torch import Tensor

from steplab.parallel import peer_copies
from steplab.parallel.peer_copies import BLOCK, PIECES, UNIT_BYTES, Means, mean_arguments, mean_kernel
from steplab.parallel.peer_memory import Piece

pytestmark = [pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")]
SIZES = [BLOCK + 904, BLOCK, 1, 2 * BLOCK, 17, BLOCK + 1, 3 * BLOCK, 3]


@pytest.mark.parametrize("num_pieces", [1, 3, PIECES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_piece_is_averaged_where_it_belongs_and_nothing_else_is_written(
    num_pieces: int, dtype: torch.dtype
) -> None:
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


def test_a_piece_that_exceeds_32_bits_when_rounded_up_to_blocks_is_averaged_from_its_first() -> None:
    torch.manual_seed(0)
    own, others, target = torch.randn(2 * BLOCK), torch.randn(2 * BLOCK), torch.full((2 * BLOCK,), 7.0)
    (_, starts, counts), programs = mean_arguments([Piece(own.data_ptr(), 0, 4 * (2**31 - 1))], own.dtype)
    assert programs == 2**31 // BLOCK
    mean_kernel[(2,)](target, others, BLOCK, (own,) * PIECES, starts, counts, OTHERS=1, BLOCK=BLOCK)
    torch.testing.assert_close(target.double(), mean_of(own, others), rtol=1e-6, atol=1e-6)


def test_the_kernel_is_compiled_for_pieces_that_32_bits_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes a number's width from its first launch."""
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **constants: launched.append(given)

    monkeypatch.setattr(peer_copies, "mean_kernel", Kernel())
    Means(torch.device("cpu"), 1)._compile(torch.float32, aligned=True)
    ((_, _, distance, _, starts, counts),) = launched
    assert min(map(abs, (distance, *starts, *counts))) >= 2**31


@pytest.mark.parametrize("skipped", [0, 4])
def test_more_pieces_than_a_launch_takes_are_several_launches(monkeypatch: pytest.MonkeyPatch, skipped: int) -> None:
    launched: list[Any] = []

    class Compiled:
        def __init__(self, *kind: object) -> None:
            self.kind = kind

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, stream: launched.append((self.kind, grid, given[:3], given[3:-2], given[-2:], stream))

    monkeypatch.setattr(Means, "_compile", Compiled)
    size_bytes = 4 * (BLOCK + 1)
    pieces = [Piece(1 << 20 | index << 8, 64 * index, size_bytes) for index in range(PIECES)]
    pieces.append(Piece((1 << 30) + skipped, 64 * PIECES, size_bytes))
    Means(torch.device("cpu"), 3).start(9, pieces, 1 << 40, 1 << 41, 1 << 12, torch.float32)
    kinds, grids, places, arguments, constants, streams = zip(*launched, strict=True)
    assert set(kinds) == {(torch.float32, skipped == 0)}
    assert grids == ((2 * PIECES, 1, 1), (2, 1, 1))
    assert set(places) == {(1 << 40, 1 << 41, (1 << 12) // 4)}
    owns, starts, counts = ([value for launch in arguments for value in launch[which]] for which in range(3))
    unused = [0] * (PIECES - 1)
    assert owns == [piece.own for piece in pieces] + unused
    assert starts == [4 * index for index in range(PIECES + 1)] + unused
    assert counts == [BLOCK + 1] * (PIECES + 1) + unused
    assert set(constants) == {(3, BLOCK)}
    assert set(streams) == {9}


def mean_of(*rows: Tensor) -> Tensor:
    return torch.stack([row.double() for row in rows]).mean(0)
