from collections.abc import Callable

import pytest
import torch
from tests.unit import test_fp8
from torch import Tensor

from steplab.ops.fp8.casts import E4M3, E5M2, amax, cast_both, plain_cast_both
from steplab.ops.fp8.linear import fp8_linear

pytestmark = pytest.mark.skipif(
    torch.cuda.get_device_capability() < (8, 9), reason="no CUDA GPU of capability 8.9 or newer"
)
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", test_fp8.FORMATS, ids=str)
@pytest.mark.parametrize("largest", [448.0, 57344.0, 3.0, 1e-3, 1e30, 0.0])
def test_every_number_is_cast_as_by_torch(largest: float, dtype: torch.dtype) -> None:
    test_fp8.check_casts(test_fp8.every_bf16_number("cuda"), torch.tensor(largest, device="cuda"), dtype)


@pytest.mark.parametrize("dtype", test_fp8.FORMATS, ids=str)
@pytest.mark.parametrize("shape", [*test_fp8.SHAPES, (8192, 2560), (1024, 11008), (4097, 2049)], ids=str)
def test_any_shape_is_cast_in_both_layouts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    test_fp8.check_shape(shape, dtype, "cuda")


def test_amax_is_that_of_all_elements() -> None:
    test_fp8.check_amax("cuda")
    x = torch.zeros(20_000_001, dtype=BF16, device="cuda")
    x[-1] = -2.0
    assert amax(x) == 2.0


def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of GPU memory")
    x = torch.randn(2**19 + 16, 4112, dtype=BF16, device="cuda")
    largest = amax(x)
    assert largest == max(part.abs().max() for part in x.split(2**16))
    rows, columns = cast_both(x, largest)
    wanted, wanted_columns, _ = plain_cast_both(x[-32:], largest, E4M3)
    assert torch.equal(rows.values[-32:].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(columns.values[:, -32:].view(torch.uint8), wanted_columns.view(torch.uint8))


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("sizes", [(8192, 2560, 2560), (512, 4096, 1024), (48, 8192, 16)], ids=str)
def test_a_product_is_that_of_its_operands(
    sizes: tuple[int, int, int], formats: tuple[torch.dtype, torch.dtype], fast: bool
) -> None:
    test_fp8.check_product(sizes, formats, fast, "cuda")


@pytest.mark.parametrize("sizes", [(4, 2048, 2560, 2560), (1, 48, 16, 112)], ids=str)
def test_a_layer_is_as_near_to_float64_as_its_formats_allow(sizes: tuple[int, int, int, int]) -> None:
    test_fp8.check_layer(sizes, "cuda")


@pytest.mark.parametrize("sizes", [(4, 2048, 32, 32, 80), (2, 1000, 8, 2, 128), (2, 5, 3, 1, 10)], ids=str)
def test_producers_give_the_largest_magnitude_of_what_they_write(sizes: tuple[int, int, int, int, int]) -> None:
    """bf16 as for fp8; in float32 multiply and add may be fused differently."""
    test_fp8.check_producers(sizes, BF16, "cuda")


def test_layers_that_hand_on_magnitudes_give_the_bits_of_layers_that_find_them() -> None:
    test_fp8.check_joined(test_fp8.feed_forward_of("cuda", 2048, 2560, 10240), test_fp8.heads_of("cuda", 2048, 128))


@pytest.mark.parametrize("function", [fp8_linear, test_fp8.in_one])
def test_layers_never_wait_for_the_device_and_are_recorded_as_graphs(function: Callable[..., Tensor]) -> None:
    *given, dy = test_fp8.feed_forward_of("cuda", 256, 256, 512)
    leaves = [
        x.requires_grad_()
        for x in (given if function is test_fp8.in_one else (given[0], given[2].t().contiguous()[:256]))
    ]

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, dy)

    wanted = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
