import os
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.first import first
from torch import Tensor
from torch.nn.functional import linear

from steplab.ops.errors import Unsupported
from steplab.ops.fp8 import casts, kernels
from steplab.ops.fp8.casts import E4M3, E5M2, Operand, amax, cast_both, plain_amax, plain_cast, plain_cast_both
from steplab.ops.fp8.linear import fp8_heads, fp8_linear, fp8_swiglu, product
from steplab.ops.rms_norm import add_rms_norm, add_rms_norm_amax
from steplab.ops.rotary_heads import rotary_heads, rotary_heads_backward_amax
from steplab.ops.swiglu import swiglu, swiglu_amax, swiglu_backward_amax

assert kernels  # imported before the tests are collected, so that the interpreter is exact (tests/interpreted.py)
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (where there is a GPU, tests/gpu)"
)
FORMATS = [E4M3, E5M2]
SHAPES = [(3, 7), (70, 130), (1, 16), (80, 48)]
FAST_BITS = 13
"""Bits of a fast sum behind the leading one on Hopper's tensor cores."""


# --- casts ----------------------------------------------------------------------------------------------------------


def every_bf16_number(device: str) -> Tensor:
    bits = torch.arange(2**16, device=device, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).view(256, 256)


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    assert found.is_contiguous()
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    nothing = wanted.float().isnan()
    assert torch.equal(found.float().isnan(), nothing)
    assert torch.equal(found.view(torch.uint8)[~nothing], wanted.view(torch.uint8)[~nothing])


def check_casts(x: Tensor, largest: Tensor, dtype: torch.dtype) -> None:
    rows, columns, inverse_scale = plain_cast_both(x, largest, dtype)
    for operand, wanted in zip(cast_both(x, largest, dtype), (rows, columns), strict=True):
        assert_same_bits(operand.values, wanted)
        assert torch.equal(operand.inverse_scale, inverse_scale)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("largest", [57344.0, 1e-3, 1e30, 0.0])
def test_every_number_is_cast_as_by_torch(largest: float, dtype: torch.dtype) -> None:
    x = every_bf16_number("cpu")
    x[x.abs() < torch.finfo(x.dtype).smallest_normal] = 0  # the interpreter changes subnormals
    check_casts(x, torch.tensor(largest), dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_is_cast_in_both_layouts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_shape(shape, dtype, "cpu")


def check_shape(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).bfloat16()
    assert torch.equal(amax(x), plain_amax(x))
    check_casts(x, amax(x), dtype)
    check_casts(x.t(), amax(x) / 2, dtype)  # not contiguous, and magnitudes above that are cut off


def test_amax_is_that_of_all_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "AMAX_PROGRAMS", 2)
    monkeypatch.setattr(casts, "AMAX_BLOCK", 16)
    check_amax("cpu")


def check_amax(device: str) -> None:
    x = torch.randn(101, device=device).bfloat16()
    for place in (0, 40, 100):
        for value in (-7.0, float("inf"), float("nan")):
            changed = x.clone()
            changed[place] = value
            torch.testing.assert_close(amax(changed), plain_amax(changed), rtol=0, atol=0, equal_nan=True)
    assert amax(torch.zeros(3, 5, device=device, dtype=torch.bfloat16)) == 0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    x, weight = torch.randn(16, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    x[3, 4] = bad
    assert fp8_linear(x, weight)[3].isnan().all()


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    assert torch.equal(fp8_linear(x, torch.randn(48, 32).bfloat16()), torch.zeros(16, 48, dtype=torch.bfloat16))


# --- products -------------------------------------------------------------------------------------------------------


def dequantised(operand: Operand) -> Tensor:
    return operand.values.double() * operand.inverse_scale.double()


@pytest.mark.parametrize(
    ("dtypes", "error"), [((E4M3, E4M3), 0.037), ((E4M3, E5M2), 0.059), ((torch.bfloat16, torch.bfloat16), 0.0023)]
)
def test_formats_cost_what_the_chapter_says(dtypes: tuple[torch.dtype, torch.dtype], error: float) -> None:
    torch.manual_seed(0)
    operands = [torch.randn(256, 4096).double() for _ in dtypes]
    rounded = []
    for x, dtype in zip(operands, dtypes, strict=True):
        scale = 1.0 if dtype == torch.bfloat16 else torch.finfo(dtype).max / float(x.abs().max())
        rounded.append((x * scale).float().to(dtype).double() / scale)
    exact, found = operands[0] @ operands[1].T, rounded[0] @ rounded[1].T
    assert float((found - exact).norm() / exact.norm()) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("fast", [True, False])
def test_a_product_is_that_of_its_operands(formats: tuple[torch.dtype, torch.dtype], fast: bool) -> None:
    check_product((32, 256, 48), formats, fast, "cpu")


def check_product(
    sizes: tuple[int, int, int], formats: tuple[torch.dtype, torch.dtype], fast: bool, device: str
) -> None:
    """Off by rounding the result, and by sums: each 32 summands to a few bits in fast mode."""
    torch.manual_seed(0)
    rows, summed, columns = sizes
    given = torch.randn(rows, summed, device=device), torch.randn(columns, summed, device=device)
    a, b = (Operand(*plain_cast(x, plain_amax(x), dtype)) for x, dtype in zip(given, formats, strict=True))
    exact = dequantised(a) @ dequantised(b).t()
    magnitudes = dequantised(a).abs() @ dequantised(b).abs().t()
    of_sums = (summed / 32 * 2.0**-FAST_BITS if fast else summed * 2.0**-23) * magnitudes
    bound = torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 2 * of_sums
    assert ((product(a, b, torch.bfloat16, fast=fast).double() - exact).abs() <= bound).all()


def outputs_and_gradients(function: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    *inputs, dy = given
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def test_a_layer_is_as_near_to_float64_as_its_formats_allow() -> None:
    check_layer((2, 24, 64, 96), "cpu")


def check_layer(sizes: tuple[int, int, int, int], device: str) -> None:
    """At most 1.1 times the error of float64 products of torch's casts."""
    torch.manual_seed(0)
    batch, tokens, inputs, outputs = sizes
    x = torch.randn(batch, tokens, inputs, device=device).bfloat16()
    weight = (0.02 * torch.randn(outputs, inputs, device=device)).bfloat16()
    dy = (1e-6 * torch.randn(batch, tokens, outputs, device=device)).bfloat16()
    found = outputs_and_gradients(fp8_linear, x, weight, dy)
    exact = outputs_and_gradients(linear, x.double(), weight.double(), dy)
    x8, w8, dy8 = (
        dequantised(Operand(*plain_cast(each, plain_amax(each), dtype)))
        for each, dtype in ((x, E4M3), (weight, E4M3), (dy, E5M2))
    )
    emulated = [linear(x8, w8), dy8 @ w8, dy8.flatten(0, 1).t() @ x8.flatten(0, 1)]
    for ours, best, wanted in zip(found, emulated, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert ours.shape == wanted.shape
        assert (ours.double() - wanted).norm() <= 1.1 * (best - wanted).norm()


def test_what_is_saved_is_fp8() -> None:
    saved: list[Tensor] = []

    def save(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    x, weight = torch.randn(32, 64).bfloat16(), torch.randn(48, 64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        fp8_linear(x, weight)
    assert sum(each.nbytes for each in saved if each.dim()) == 48 * 64 + 32 * 64


# --- largest magnitudes by what makes the values ----------------------------------------------------------------------


@pytest.mark.parametrize("sizes", first(1, [(3, 1, 1, 1, 700), (2, 5, 3, 1, 10), (1, 40, 2, 2, 6)]), ids=str)
@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float32]), ids=str)
def test_producers_give_the_largest_magnitude_of_what_they_write(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check_producers(sizes, dtype, "cpu")


def check_producers(sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    batch, context, num_heads, num_kv_heads, head_dim = sizes

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, branch, weight = made(batch * context, head_dim), made(batch * context, head_dim), made(head_dim)
    dq, dk, dv = (made(batch, n, context, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads))
    merged = made(batch, context, (num_heads + 2 * num_kv_heads) * head_dim).requires_grad_()
    angles = torch.rand(context, head_dim // 2, device=device)
    table = torch.stack((angles.cos(), angles.sin()))
    for added in (0.0, float("nan")):
        x[-1, -1] += added
        dv[0, 0, 0, 0] += added
        joined, grad = x.clone().requires_grad_(), branch[:, : head_dim // 2]
        found, plain = add_rms_norm_amax(joined, branch, weight, 1e-5), add_rms_norm(joined, branch, weight, 1e-5)
        assert_amax_beside(plain, *found)
        assert not found[2].requires_grad
        gradients = (torch.autograd.grad(outputs[:2], joined, (branch, x)) for outputs in (found, plain))
        assert all(map(same, *gradients))
        assert_amax_beside([swiglu(joined)], *swiglu_amax(joined))
        wanted = torch.autograd.grad(swiglu(joined), joined, grad)
        assert_amax_beside(wanted, *swiglu_backward_amax(grad, joined))
        wanted = torch.autograd.grad(rotary_heads(merged, table, num_heads), merged, (dq, dk, dv))
        assert_amax_beside(wanted, *rotary_heads_backward_amax(dq, dk, dv, table))


def same(found: Tensor, wanted: Tensor) -> bool:
    nothing = wanted.isnan()
    return torch.equal(found.isnan(), nothing) and torch.equal(found[~nothing], wanted[~nothing])


def assert_amax_beside(wanted: Sequence[Tensor], *found: Tensor) -> None:
    *values, largest = found
    assert all(map(same, values, wanted))
    assert largest.dtype == torch.float32
    assert same(largest, plain_amax(values[0]))


def feed_forward_of(device: str, tokens: int = 16, width: int = 48, inner: int = 32) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (2, tokens, width), (2 * inner, width), (width, inner), (2, tokens, width)
    return [torch.randn(size, device=device).bfloat16() for size in sizes]


def in_one(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    normed, total, largest = add_rms_norm_amax(x, x, x.new_ones(x.shape[-1]), 1e-5)
    return total + fp8_swiglu(normed, gate_up, down, x_amax=largest)


def one_by_one(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    normed, total = add_rms_norm(x, x, x.new_ones(x.shape[-1]), 1e-5)
    h = swiglu(fp8_linear(normed, gate_up))
    return total + fp8_linear(h, down)


def heads_of(device: str, context: int = 8, head_dim: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (2, context, 48), (5 * head_dim, 48), (2, 5, context, head_dim)
    return [torch.randn(size, device=device).bfloat16() for size in sizes]


def table_of(x: Tensor, weight: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), torch.ones(weight.shape[0] // 10, device=x.device))
    return torch.stack((angles.cos(), angles.sin()))


def heads_in_one(x: Tensor, weight: Tensor) -> Tensor:
    largest = amax(x.detach())
    return torch.cat(fp8_heads(x, weight, table_of(x, weight), 3, x_amax=largest), 1)


def heads_one_by_one(x: Tensor, weight: Tensor) -> Tensor:
    merged = fp8_linear(x, weight)
    return torch.cat(rotary_heads(merged, table_of(x, weight), 3), 1)


def test_layers_that_hand_on_magnitudes_give_the_bits_of_layers_that_find_them() -> None:
    check_joined(feed_forward_of("cpu"), heads_of("cpu"))


def check_joined(feed_forward: list[Tensor], heads: list[Tensor]) -> None:
    for functions, given in (((in_one, one_by_one), feed_forward), ((heads_in_one, heads_one_by_one), heads)):
        found, wanted = (outputs_and_gradients(function, *given) for function in functions)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


# --- refusals, torch.compile ------------------------------------------------------------------------------------------


def test_what_products_and_casts_do_not_take_is_refused() -> None:
    for sizes in ((8, 16, 16), (16, 24, 16), (16, 16, 8)):
        tokens, inputs, outputs = sizes
        with pytest.raises(Unsupported, match=r"multiples of 16, not .* use torch\.nn\.functional\.linear"):
            fp8_linear(torch.zeros(tokens, inputs), torch.zeros(outputs, inputs))
    with pytest.raises(Unsupported, match=r"multiples of 16, not \(16, 24, 16\)"):
        fp8_swiglu(torch.zeros(16, 16), torch.zeros(48, 16), torch.zeros(16, 24))
    with pytest.raises(Unsupported, match=r"fp8 from float32 .* take bfloat16; cast to it first"):
        fp8_linear(torch.zeros(16, 16), torch.zeros(16, 16))
    x = torch.randn(16, 16).bfloat16().requires_grad_()
    with pytest.raises(Unsupported, match="the second derivative of fp8_linear"):
        torch.autograd.grad(fp8_linear(x, x).sum(), x, create_graph=True)


def test_they_are_operators_as_torch_expects_them() -> None:
    x, largest = torch.randn(16, 48).bfloat16(), torch.tensor(3.0)
    ops, checks = torch.ops.steplab, ("test_schema", "test_faketensor")
    heads, table = [torch.randn(2, 3, 4, 6) for _ in range(3)], torch.rand(2, 3, 3)
    for producer, arguments in (
        (ops.add_rms_norm_amax, (x, x, torch.rand(48, requires_grad=True), 1e-5, x.dtype)),
        (ops.swiglu_amax, (x,)),
        (ops.swiglu_backward_amax, (x[:, :24], x)),
        (ops.rotary_heads_backward_amax, (*heads, table)),
    ):
        torch.library.opcheck(producer.default, arguments, test_utils=checks)
    torch.library.opcheck(ops.amax.default, (x,), test_utils=checks)
    torch.library.opcheck(ops.fp8_cast_both.default, (x, largest, E4M3), test_utils=checks)


def test_compiled_it_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(size).bfloat16() for size in ((2, 16, 48), (32, 48), (2, 16, 32)))
    functions: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (fp8_linear, [x, weight, dy]), (in_one, feed_forward_of("cpu")), (heads_in_one, heads_of("cpu"))
    ]  # fmt: skip
    for function, given in functions:
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        eager, other = (outputs_and_gradients(each, *given) for each in (function, compiled))
        assert all(torch.equal(*pair) for pair in zip(eager, other, strict=True))
