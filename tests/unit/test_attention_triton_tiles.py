from collections.abc import Iterator
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steplab.ops.attention import triton_tuning
from steplab.ops.attention.triton_launch import base_two, positive_scale
from steplab.ops.attention.triton_tensors import columns, copy_back, readable, strides_of, writable
from steplab.ops.attention.triton_tuning import WIDEST_TILE, Kernel, Tiles, tiles_for, tiles_if_any
from steplab.ops.errors import Unsupported

BOXES = [16, 32, 64, 128, 256]


# --- columns -------------------------------------------------------------------------------------------------------


def test_columns_hold_the_head_dimension_in_powers_of_two() -> None:
    for head_dim in range(1, 257):
        parts = columns(head_dim)
        assert all(bin(size).count("1") == 1 for size in (parts.main, parts.box)), head_dim
        assert parts.box in BOXES, head_dim
        assert parts.box // 2 < max(head_dim, 9) <= parts.box, head_dim
        assert head_dim <= parts.main + parts.rest <= parts.box, head_dim
        if parts.rest:
            assert parts.rest in BOXES, head_dim
            assert parts.rest < parts.main == parts.box // 2 < head_dim
            assert parts.rest // 2 < max(head_dim - parts.main, 9), head_dim  # no smaller one would do


@pytest.mark.parametrize(
    ("head_dim", "expected"), [(64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (97, (128, 0)), (160, (128, 32))]
)
def test_columns_of_the_usual_head_dimensions(head_dim: int, expected: tuple[int, int]) -> None:
    assert (columns(head_dim).main, columns(head_dim).rest) == expected


# --- tensors -------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = [draw(st.integers(1, 4)) for _ in range(3)] + [draw(st.integers(1, 20))]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    order = draw(st.permutations(range(4)))
    room = [size + draw(st.sampled_from([0, 0, 1, 4])) for size in shape]
    step = draw(st.sampled_from([1, 1, 1, 2]))
    offset = draw(st.sampled_from([0, 0, 1, 8]))
    num = offset + step * room[0] * room[1] * room[2] * room[3]
    flat = torch.arange(num).remainder(199).to(dtype)[offset::step]
    x = flat[: room[0] * room[1] * room[2] * room[3]].view([room[dim] for dim in order])
    x = x.permute([order.index(dim) for dim in range(4)])
    x = x[: shape[0], : shape[1], : shape[2], : shape[3]]
    for dim in range(4):
        if draw(st.integers(0, 9)) == 0:
            x = x.narrow(dim, 0, 1).expand(*x.shape[:dim], shape[dim], *x.shape[dim + 1 :])
    return x


def the_copy_engine_takes(x: Tensor) -> bool:
    """cuTensorMapEncodeTiled: addresses and strides of 16 bytes, and a dense last dimension."""
    size = x.element_size()
    strides = strides_of(x.shape, x.stride())
    aligned = x.data_ptr() % 16 == 0 and all(stride > 0 and stride * size % 16 == 0 for stride in strides[:-1])
    return aligned and strides[-1] == 1


@given(x=tensors())
def test_readable_holds_the_same_numbers_where_the_copy_engine_takes_them(x: Tensor) -> None:
    found = readable(x)
    assert the_copy_engine_takes(found)
    assert torch.equal(found[..., : x.shape[-1]], x)
    assert not found[..., x.shape[-1] :].any()
    assert found.shape[-1] * x.element_size() % 16 == 0


@given(x=tensors())
def test_nothing_is_copied_without_need(x: Tensor) -> None:
    needless = the_copy_engine_takes(x) and x.shape[-1] * x.element_size() % 16 == 0
    assert (readable(x) is x) == needless
    assert (writable(x) is x) == needless


@given(x=tensors())
def test_what_is_written_arrives(x: Tensor) -> None:
    wanted = torch.zeros_like(x)
    room = writable(wanted)
    assert the_copy_engine_takes(room)
    room[..., : x.shape[-1]] = x
    copy_back(room, wanted)
    assert torch.equal(wanted, x)


@given(x=tensors())
def test_strides_reach_every_element(x: Tensor) -> None:
    again = x.as_strided(x.shape, strides_of(x.shape, x.stride()))
    assert torch.equal(again, x)
    for dim, (stride, own) in enumerate(zip(again.stride(), x.stride(), strict=True)):
        assert stride == own or x.shape[dim] == 1


# --- scales --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, -0.0])
def test_a_positive_scale_gives_the_same_scores(scale: float) -> None:
    q = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(1))
    same_q, positive = positive_scale(q, scale)
    assert positive > 0
    torch.testing.assert_close(same_q * positive, q * scale)
    torch.testing.assert_close(torch.exp2(q * base_two(0.3)), torch.exp(q * 0.3))


# --- tiles ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    triton_tuning._found.cache_clear()
    yield
    triton_tuning._found.cache_clear()


def tiles_on(
    gpu: str,
    capability: tuple[int, int],
    kernel: Kernel = "forward",
    tokens: int = 512,
    *,
    bits: int = 16,
    head_dim: int = 64,
    hopper: bool | None = None,
) -> Tiles:
    hopper = capability == (9, 0) and bits == 16 if hopper is None else hopper
    found = triton_tuning._found(kernel, gpu, capability, hopper, bits, head_dim, tokens)
    assert found is not None
    return found


@pytest.mark.parametrize("kernel", ["forward", "backward_kv", "backward_q"])
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("box", BOXES)
def test_the_table_has_portable_tiles_for_every_gpu(box: int, bits: int, kernel: Kernel) -> None:
    tiles = tiles_on("a GPU nobody knows", (8, 0), kernel, 10**6, bits=bits, head_dim=box)
    assert (tiles.variant, tiles.gpu, tiles.box, tiles.bits) == ("portable", "any", box, bits)
    assert [row.tokens for row in triton_tuning.table() if row == tiles] == [None]


def test_rows_of_the_table_are_ones_that_kernels_can_be_made_for() -> None:
    for row in triton_tuning.table():
        assert row.kernel in get_args(Kernel)
        assert row.box in BOXES
        for size in (row.queries, row.keys):
            assert size in (16, 32, 64, 128) or (row.kernel, row.variant, size) == ("forward", "hopper", 192), row
        assert row.kernel == "forward" or row.queries <= WIDEST_TILE
        assert row.warps in (1, 2, 4, 8)
        assert row.stages >= 1
        if row.variant == "hopper":
            assert row.bits == 16
            assert row.gpu not in ("any", "sm80", "sm89", "sm100")
            if row.kernel == "backward":
                assert (row.queries, row.keys) == (128 if row.box <= 64 else 64, 128), row  # what its registers hold
            else:
                assert row.queries in ((128, 192) if row.box <= 64 else (128,)), row  # two consumers of 64, or three
            assert row.stages >= 2, row  # a tile is multiplied a round after requesting the next
        assert row.columns is None or row.box // 2 < row.columns < row.box, row


def test_no_two_rows_are_for_the_same_thing() -> None:
    keys = [(row.kernel, row.gpu, row.bits, row.box, row.columns, row.tokens) for row in triton_tuning.table()]
    assert len(set(keys)) == len(keys)


def row(
    gpu: str, variant: str = "portable", tokens: int | None = None, keys: int = 64, columns: int | None = None
) -> Tiles:
    return Tiles(
        kernel="forward",
        gpu=gpu,
        bits=16,
        box=64,
        columns=columns,
        tokens=tokens,
        variant=variant,  # type: ignore[arg-type]
        queries=128,
        keys=keys,
        stages=2,
    )


SMALL_TABLE = (
    row("any"),
    row("sm90", "hopper", keys=32),
    row("GPU A", "hopper", keys=16),
    row("GPU A", "hopper", tokens=1024, keys=128),
    row("GPU A", "hopper", tokens=4096, keys=32),
    row("GPU B", keys=16),
    row("GPU A", "hopper", columns=48, keys=64),
)


@pytest.mark.parametrize(
    ("gpu", "capability", "tokens", "expected"),
    [
        ("GPU A", (9, 0), 512, SMALL_TABLE[3]),
        ("GPU A", (9, 0), 1024, SMALL_TABLE[3]),
        ("GPU A", (9, 0), 1025, SMALL_TABLE[4]),
        ("GPU A", (9, 0), 5000, SMALL_TABLE[2]),
        ("another Hopper GPU", (9, 0), 512, SMALL_TABLE[1]),
        ("GPU B", (8, 0), 512, SMALL_TABLE[5]),
        ("GPU A", (8, 0), 512, SMALL_TABLE[0]),  # what was measured elsewhere does not run here
        ("cpu", (0, 0), 512, SMALL_TABLE[0]),
        ("a GPU of tomorrow", (12, 0), 512, SMALL_TABLE[0]),
    ],
)
def test_the_nearest_row_is_taken(gpu: str, capability: tuple[int, int], tokens: int, expected: Tiles) -> None:
    with patch.object(triton_tuning, "table", return_value=SMALL_TABLE):
        assert tiles_on(gpu, capability, tokens=tokens) == expected


@pytest.mark.parametrize(("head_dim", "expected"), [(33, 6), (48, 6), (49, 3), (64, 3)])
def test_a_row_for_fewer_columns_comes_first(head_dim: int, expected: int) -> None:
    with patch.object(triton_tuning, "table", return_value=SMALL_TABLE):
        assert tiles_on("GPU A", (9, 0), head_dim=head_dim) == SMALL_TABLE[expected]


def test_a_triton_without_our_gluon_gets_portable_kernels() -> None:
    with patch.object(triton_tuning, "table", return_value=SMALL_TABLE):
        assert tiles_on("GPU A", (9, 0), hopper=False) == SMALL_TABLE[0]


def test_what_the_table_lacks_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"on cpu .*triton_tiles.toml has no forward for 512 columns of 16 bits"):
        tiles_for("forward", torch.empty(1, 512, dtype=torch.float16), 100)
    assert tiles_if_any("backward", torch.device("cpu"), 16, 64, 100) is None, "in one sweep on a CPU"


def test_gradients_are_made_in_one_sweep_where_the_gpu_and_its_triton_can() -> None:
    dims = (64, 80, 128)
    assert {tiles_on("NVIDIA H200", (9, 0), "backward", head_dim=dim).variant for dim in dims} == {"hopper"}
    assert triton_tuning._found("backward", "NVIDIA H200", (9, 0), True, 16, 256, 100) is None
    assert triton_tuning._found("backward", "NVIDIA H200", (9, 0), False, 32, 64, 100) is None
    assert triton_tuning._found("backward", "NVIDIA A100", (8, 0), False, 16, 64, 100) is None
    assert triton_tuning._found("backward", "NVIDIA H200", (9, 0), False, 16, 64, 100) is None


def test_tensors_on_a_cpu_get_portable_tiles_of_their_width() -> None:
    tiles = tiles_for("backward_q", torch.empty(1, 128, dtype=torch.float16), 100)
    assert (tiles.kernel, tiles.variant, tiles.bits, tiles.box) == ("backward_q", "portable", 16, 128)
